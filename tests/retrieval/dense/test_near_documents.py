"""A session's near documents: found beside the rounds, copied from in them, gone once they are removed."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from retrieval_service.dense.embeddings import TableEmbedder, Vectors
from retrieval_service.dense.errors import EmbeddingsFailed
from retrieval_service.dense.library import PUBLIC, Chunking, DocumentLibrary
from retrieval_service.dense.near_documents import NearDocuments, NearLimits, Searcher, TopicRule
from tests.in_time import in_time

RULE = TopicRule(window=8, every=4, threshold=0.7)
SECONDS = 10


def topic(number: int, length: int = 60) -> list[int]:
    """Ids of one topic: one of 20 sets of ten ids."""
    drawn = np.random.default_rng(number)
    return (drawn.integers(0, 10, length) + 10 * number).tolist()


@pytest.fixture
def library(embedder: TableEmbedder) -> DocumentLibrary:
    library = DocumentLibrary(embedder, "digest", chunking=Chunking(window=8, stride=4))
    library.add(PUBLIC, [(f"{number}", topic(number)) for number in range(10)])
    library.add("a", [("of a", topic(11))])
    library.add("b", [("of b", topic(11))])
    return library


@contextmanager
def closing(documents: NearDocuments) -> Iterator[NearDocuments]:
    try:
        yield documents
    finally:
        documents.close()


class Waiting:
    """An embedder that waits until a test lets it work, and fails if the test says so."""

    def __init__(self, embedder: TableEmbedder) -> None:
        self._embedder = embedder
        self.name, self.digest, self.dimensions = embedder.name, embedder.digest, embedder.dimensions
        self.may_go = threading.Event()
        self.asked: list[list[int]] = []
        self.failing = False

    def embed(self, windows: Sequence[Sequence[int] | np.ndarray[Any, Any]]) -> Vectors:
        self.asked += [list(window) for window in windows]
        assert self.may_go.wait(SECONDS)
        if self.failing:
            raise EmbeddingsFailed("on purpose")
        return self._embedder.embed(windows)


@pytest.fixture
def waiting(embedder: TableEmbedder) -> Waiting:
    return Waiting(embedder)


@pytest.fixture
def waiting_library(waiting: Waiting) -> DocumentLibrary:
    waiting.may_go.set()
    library = DocumentLibrary(waiting, "digest", chunking=Chunking(window=8, stride=4))
    library.add(PUBLIC, [(f"{number}", topic(number)) for number in range(10)])
    waiting.may_go.clear()
    waiting.asked.clear()
    return library


def test_what_a_near_document_says_next_is_drafted(library: DocumentLibrary) -> None:
    with closing(NearDocuments(library, rule=RULE)) as documents:
        memory = documents.follow("s", "a", topic(3)[:20])
        assert documents.is_idle(SECONDS)
        assert memory.documents[0] == "3"
        found = memory.lookup(topic(3)[:20], node_limit=16, depth=5)
        assert found is not None
        assert found.tokens == tuple(topic(3)[20:25])
        assert found.match_length == 20


def test_a_session_copies_from_its_own_tenants_documents_alone(library: DocumentLibrary) -> None:
    limits = NearLimits(documents=50)
    with closing(NearDocuments(library, rule=RULE, limits=limits)) as documents:
        memories = {tenant: documents.follow(tenant, tenant, topic(11)[:20]) for tenant in ("a", "b", "c")}
        assert documents.is_idle(SECONDS)
        assert memories["a"].documents[0] == "of a"
        assert "of b" not in memories["a"].documents
        assert memories["b"].documents[0] == "of b"
        assert not {"of a", "of b"} & set(memories["c"].documents)
        assert memories["c"].lookup(topic(11)[:20], node_limit=9, depth=9) is None


def test_near_documents_change_when_the_topic_does(library: DocumentLibrary) -> None:
    with closing(NearDocuments(library, rule=RULE, limits=NearLimits(documents=1))) as documents:
        memory = documents.follow("s", "a", topic(3)[:20])
        assert documents.is_idle(SECONDS)
        held = memory.documents
        documents.progress("s", topic(3)[:23])
        documents.progress("s", topic(3)[:24])
        assert documents.is_idle(SECONDS)
        assert memory.documents == held == ("3",)
        documents.progress("s", topic(3)[:24] + topic(5)[:12])
        assert documents.is_idle(SECONDS)
        assert memory.documents == ("5",)


def test_a_deleted_document_is_not_copied_from_again(library: DocumentLibrary) -> None:
    with closing(NearDocuments(library, rule=RULE, limits=NearLimits(documents=1))) as documents:
        ids = topic(3)[:20]
        memory = documents.follow("s", "a", ids)
        assert documents.is_idle(SECONDS)
        assert memory.lookup(ids, node_limit=9, depth=9)
        library.remove(PUBLIC, "3")
        assert memory.lookup(ids, node_limit=9, depth=9) is None
        documents.progress("s", ids)
        assert documents.is_idle(SECONDS)
        assert memory.documents
        assert memory.documents != ("3",)


def test_deleting_during_lookups_leaves_them_whole_or_empty(library: DocumentLibrary) -> None:
    with closing(NearDocuments(library, rule=RULE, limits=NearLimits(documents=1))) as documents:
        ids = topic(3)[:20]
        memory = documents.follow("s", "a", ids)
        assert documents.is_idle(SECONDS)
        answers: list[tuple[int, ...]] = []
        over = threading.Event()

        def look_up() -> None:
            while not over.is_set():
                found = memory.lookup(ids, node_limit=16, depth=3)
                answers.append(() if found is None else found.tokens)

        thread = threading.Thread(target=look_up)
        thread.start()
        while not answers:
            time.sleep(0.001)
        library.remove(PUBLIC, "3")
        before = len(answers)
        while len(answers) < before + 3:
            time.sleep(0.001)
        over.set()
        thread.join(SECONDS)
        assert set(answers) == {tuple(topic(3)[20:23]), ()}
        assert answers[-1] == ()


def test_a_search_under_way_never_holds_up_a_lookup(
    waiting_library: DocumentLibrary, waiting: Waiting
) -> None:
    with closing(NearDocuments(waiting_library, rule=RULE)) as documents:
        memory = documents.follow("s", "a", topic(3)[:20])
        taken = []
        for length in range(20, 40):
            started = time.perf_counter()
            documents.progress("s", topic(3)[:length])
            assert memory.lookup(topic(3)[:length], node_limit=9, depth=9) is None
            taken.append(time.perf_counter() - started)
        assert not documents.is_idle(0.01)
        waiting.may_go.set()
        assert documents.is_idle(SECONDS)
        assert memory.lookup(topic(3)[:20], node_limit=9, depth=9)
    in_time(sorted(taken)[len(taken) // 2] < 0.05, taken)


def test_the_newest_wish_of_a_session_wins(waiting_library: DocumentLibrary, waiting: Waiting) -> None:
    with closing(NearDocuments(waiting_library, rule=RULE)) as documents:
        documents.follow("first", "a", topic(1)[:8])
        while not waiting.asked:
            time.sleep(0.001)
        memory = documents.follow("s", "a", topic(2)[:8])
        for number in (3, 4, 5):
            documents.progress("s", topic(2)[:8] + topic(number)[: 8 * number])
        waiting.may_go.set()
        assert documents.is_idle(SECONDS)
        assert waiting.asked == [topic(1)[:8], topic(5)[32:40]]
        assert documents.counts.replaced == 3
        assert memory.documents[0] == "5"


def test_more_sessions_than_fit_drop_the_one_that_waited_longest() -> None:
    searcher = Searcher(capacity=2)
    may_go, begun, done = threading.Event(), threading.Event(), []

    def block() -> None:
        begun.set()
        may_go.wait(SECONDS)

    try:
        searcher.ask("busy", block)
        assert begun.wait(SECONDS)
        for name in ("one", "two", "three"):
            searcher.ask(name, lambda name=name: done.append(name))
        may_go.set()
        assert searcher.is_idle(SECONDS)
        assert done == ["two", "three"]
        assert searcher.counts.dropped == 1
    finally:
        searcher.close()


def test_a_failed_search_is_counted_and_tried_again(
    waiting_library: DocumentLibrary, waiting: Waiting
) -> None:
    waiting.may_go.set()
    waiting.failing = True
    with closing(NearDocuments(waiting_library, rule=RULE)) as documents:
        memory = documents.follow("s", "a", topic(3)[:20])
        assert documents.is_idle(SECONDS)
        assert documents.counts.failed == 1
        assert memory.documents == ()
        waiting.failing = False
        documents.progress("s", topic(3)[:24])
        assert documents.is_idle(SECONDS)
        assert memory.documents[0] == "3"


def test_a_session_that_ended_is_not_searched_for(waiting_library: DocumentLibrary, waiting: Waiting) -> None:
    with closing(NearDocuments(waiting_library, rule=RULE)) as documents:
        documents.follow("first", "a", topic(1)[:8])
        while not waiting.asked:
            time.sleep(0.001)
        documents.follow("s", "a", topic(2)[:8])
        documents.end("s")
        documents.progress("s", topic(2)[:20])
        waiting.may_go.set()
        assert documents.is_idle(SECONDS)
        assert waiting.asked == [topic(1)[:8]]


def test_a_long_document_is_copied_from_around_what_was_found(embedder: TableEmbedder) -> None:
    library = DocumentLibrary(embedder, "digest", chunking=Chunking(window=8, stride=4))
    ids = np.random.default_rng(0).integers(0, 200, 5000).tolist()
    library.add("a", [("long", ids)])
    limits = NearLimits(tokens=400)
    with closing(NearDocuments(library, rule=RULE, limits=limits)) as documents:
        for at in (0, 100, 3000, 4980):
            memory = documents.follow(at, "a", ids[at : at + 12])
            assert documents.is_idle(SECONDS)
            found = memory.lookup(ids[at : at + 12], node_limit=9, depth=5)
            assert found is not None
            assert found.tokens == tuple(ids[at + 12 : at + 17])
            assert found.match_length == 12


def test_documents_too_far_away_are_left_out(library: DocumentLibrary) -> None:
    with closing(NearDocuments(library, rule=RULE, limits=NearLimits(nearest=0.95))) as documents:
        near = documents.follow("near", "c", topic(3)[8:16])
        far = documents.follow("far", "c", topic(15)[:8])
        assert documents.is_idle(SECONDS)
        assert near.documents == ("3",)
        assert far.documents == ()


@pytest.mark.parametrize(
    ("length", "looked_at", "due"),
    [(0, None, False), (1, None, True), (10, 10, False), (73, 10, False), (74, 10, True), (5, 10, True)],
)
def test_a_topic_is_looked_at_in_steps(length: int, looked_at: int | None, due: bool) -> None:
    assert TopicRule(every=64).is_due(length, looked_at) is due


def test_a_topic_has_moved_when_the_cosine_falls() -> None:
    rule = TopicRule(threshold=0.8)
    here = np.array([1, 0], dtype=np.float32)
    assert rule.has_moved(here, None)
    assert not rule.has_moved(here, here)
    assert not rule.has_moved(here, np.array([0.81, 0.586], dtype=np.float32))
    assert rule.has_moved(here, np.array([0.79, 0.613], dtype=np.float32))


@pytest.mark.parametrize("wrong", [{"window": 0}, {"every": 0}, {"threshold": float("nan")}])
def test_a_topic_rule_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="window and every are at least 1"):
        TopicRule(**wrong)
