"""The retrieval worker, without its thread: what is sent under which name, what is learnt."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.source.events import Follow, Outgoing, Progress, SessionEnded, StreamClosed
from outrider.source.followed import SourceProfile
from retrieval_service.catalogue import Catalogue
from retrieval_service.ranking import DraftShape
from retrieval_service.trie import Memory
from retrieval_service.worker import RetrievalWorker
from speculative.hashing import prefix_hash

GRACE_S = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class NearDocuments:
    """A NearMemory with the same text for every session."""

    count = 1

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.lengths: dict[Any, int] = {}

    def follow(self, session: Any, tenant: str, ids: Sequence[int]) -> Memory:
        self.lengths[session] = len(ids)
        return self.memory

    def progress(self, session: Any, ids: Sequence[int]) -> None:
        self.lengths[session] = len(ids)

    def end(self, session: Any) -> None:
        del self.lengths[session]


class Driven:
    """A worker without a thread, which a test steps."""

    def __init__(self, past: Any, documents: Any = None, most: int = 100) -> None:
        self.sent: list[dict[int, Outgoing]] = []
        self.seconds: list[str] = []
        self.clock = Clock()
        self.past = past
        self.documents = documents
        self.worker = RetrievalWorker(
            Catalogue(past, documents),
            SourceProfile(
                "retrieval", "retrieval", max_length=1000, max_sessions=most, grace_s=GRACE_S, noun="service"
            ),
            self.sent.append,
            lambda name, seconds: self.seconds.append(name),
            shape=DraftShape(),
            clock=self.clock,
        )

    def __call__(self, *events: Any) -> list[tuple[int, int, tuple[int, ...]]]:
        """Takes in events; returns (alias, source, ids) of each draft that goes out."""
        self.sent.clear()
        for event in events:
            self.worker.submit(event)
        self.worker.take_in(wait=False)
        self.worker.work()
        return [
            (alias, fragment.source, fragment.tokens)
            for message in self.sent
            for outgoing in message.values()
            for alias, fragment in outgoing.drafts
        ]

    @property
    def refusals(self) -> list[tuple[int, int, str]]:
        """The refusals of the last step, as (stream, alias, reason)."""
        return [
            (stream, alias, why)
            for message in self.sent
            for stream, outgoing in message.items()
            for alias, why in outgoing.refusals
        ]


def progress(ids: Sequence[int], fresh: int, alias: int = 1, stream: int = 0) -> Progress:
    """The last `fresh` of these ids were committed."""
    return Progress(stream, alias, len(ids) - fresh, tuple(ids[-fresh:]), prefix_hash(ids))


@pytest.fixture
def driven(past: Any) -> Driven:
    return Driven(past)


PROMPT = [1, 2, 3]


def test_what_one_session_made_is_drafted_for_the_next(driven: Driven, follow: Callable[..., Follow]) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50, 51, 52, 53], 4), SessionEnded(0, 1))
    assert driven(follow([9, 50, 51], alias=2, session="other")) == [(2, 2, (52, 53))]


def test_drafts_bear_the_number_of_the_name_that_the_session_gave(past: Any, text: Any, follow: Any) -> None:
    driven = Driven(past, NearDocuments(text([1, 2, 3, 70, 71])))
    assert driven(follow(PROMPT, sources=("dense",))) == [(1, 1, (70, 71))]
    assert driven(follow(PROMPT, sources=("x", "corpus", "dense"), session="b", alias=2)) == [
        (2, 3, (70, 71))
    ]
    assert set(driven.seconds) == {"corpus", "dense"}


def test_a_memory_that_misleads_a_tenant_is_trusted_less_in_its_next_session(
    past: Any, text: Any, follow: Any
) -> None:
    def promised(tenant: str) -> float:
        driven(follow(PROMPT, alias=9, session="last", tenant=tenant, sources=("dense",)))
        ((_, fragment),) = driven.sent[-1][0].drafts
        return float(fragment.survival[0])

    driven = Driven(past, NearDocuments(text([1, 2, 3, 70, 71])))
    for number in range(30):
        alias = 100 + number
        driven(follow(PROMPT, alias=alias, session=f"{number}", tenant="a", sources=("dense",)))
        driven(progress([*PROMPT, 80], 1, alias=alias), SessionEnded(0, alias))
    assert promised("a") < promised("b") / 3, "what a tenant's sessions learn is its own"


def test_a_session_is_looked_up_once_for_all_that_has_arrived(past: Any, text: Any, follow: Any) -> None:
    driven = Driven(past, NearDocuments(text([1, 2, 3, 70, 71, 72, 73])))
    ids = [*PROMPT, 70, 71]
    sent = driven(follow(PROMPT, sources=("dense",)), progress(ids[:4], 1), progress(ids, 1))
    assert sent == [(1, 1, (72, 73))]
    assert driven.seconds == ["dense"]
    assert list(driven.documents.lengths.values()) == [5]
    driven(SessionEnded(0, 1))
    assert not driven.documents.lengths


def test_sessions_that_do_not_learn_leave_nothing(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT, learn=False), progress([1, 2, 3, 50, 51], 2), SessionEnded(0, 1))
    assert not driven.past.outputs
    assert driven.worker.counts.tokens_learnt == 0


def test_prompts_are_not_learnt_and_output_that_came_with_a_follow_is(driven: Driven, follow: Any) -> None:
    driven(follow([1, 2, 3, 50, 51], prompt_length=3), progress([1, 2, 3, 50, 51, 52], 1))
    assert list(driven.past.outputs.values()) == [[50, 51, 52]]


def test_a_session_that_it_is_not_to_draft_for_is_learnt_from(driven: Driven, follow: Any) -> None:
    assert driven(follow([1, 2, 3, 50, 51, 52], prompt_length=3, node_limit=0), SessionEnded(0, 1)) == []
    assert driven(follow([9, 50], alias=2, session="other")) == [(2, 2, (51, 52))]


def test_another_tenant_sees_none_of_it(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT, tenant="a"), progress([1, 2, 3, 50, 51, 52], 3), SessionEnded(0, 1))
    assert driven(follow([9, 50, 51], alias=2, tenant="b")) == []
    assert driven(follow([9, 50, 51], alias=3, tenant="a")) == [(3, 2, (52,))]


def test_a_session_that_comes_back_is_kept_once_and_in_one_piece(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50, 51], 2), StreamClosed(0))
    ids = [1, 2, 3, 50, 51, 52]
    driven(follow(ids, stream=1, prompt_length=3), progress([*ids, 53], 1, stream=1), SessionEnded(1, 1))
    assert list(driven.past.outputs.values()) == [[50, 51, 52, 53]]
    assert len(driven.past.finished) == 1


def test_a_session_that_does_not_come_back_is_finished(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50], 1), StreamClosed(0))
    assert not driven.past.finished
    driven.clock.now = GRACE_S + 1
    driven()
    assert [session for _, session in driven.past.finished] == ["s#0"]


def test_the_next_turn_of_a_conversation_is_a_text_of_its_own(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50], 1))
    turn = [1, 2, 3, 50, 60, 61]
    driven(follow(turn, alias=2, epoch=8), progress([*turn, 70], 1, alias=2))
    assert list(driven.past.outputs.values()) == [[50, 70]]
    assert len(driven.past.finished) == 1, "so that nothing follows what it did not follow"


def test_nothing_is_learnt_of_what_was_forgotten_while_it_runs(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT), follow(PROMPT, alias=2, session="other"))
    driven.worker.unlearn("t", "s")
    driven(progress([1, 2, 3, 50], 1), progress([1, 2, 3, 60], 1, alias=2))
    assert list(driven.past.outputs.values()) == [[60]]
    driven(StreamClosed(0))
    driven.worker.unlearn("t", None)
    driven(follow([1, 2, 3, 50], stream=1, prompt_length=3), follow([1, 2, 3, 60, 61], 2, 1, session="other"))
    assert list(driven.past.outputs.values()) == [[60]], "nor when it is followed again"


@pytest.mark.parametrize("output", [[], [50], [50, 51], [50, 51, 60, 61], [60]])
def test_what_was_forgotten_is_not_learnt_from_a_session_that_comes_back_with_fewer_or_other_ids(
    driven: Driven, follow: Any, output: list[int]
) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50, 51, 52], 3))
    driven.worker.unlearn("t", "s")
    ids = [*PROMPT, *output]
    driven(StreamClosed(0), follow(ids, stream=1, prompt_length=3))
    driven(progress([*ids, 51, 52], 2, stream=1), StreamClosed(1))
    driven(follow(PROMPT, stream=2), progress([1, 2, 3, 50], 1, stream=2))
    assert list(driven.past.outputs.values()) == [[50, 51, 52]]


def test_the_next_turn_of_a_conversation_that_was_forgotten_is_learnt(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50], 1))
    driven.worker.unlearn("t", "s")
    turn = [1, 2, 3, 50, 60, 61]
    driven(follow(turn, alias=2, epoch=8), progress([*turn, 70], 1, alias=2))
    assert list(driven.past.outputs.values()) == [[50, 70]]


def test_a_corpus_that_the_tenant_has_not_is_refused_by_alias(driven: Driven, follow: Any) -> None:
    driven(follow(PROMPT, alias=9, corpora=("nowhere",)), follow(PROMPT, session="fine"))
    ((stream, alias, message),) = driven.refusals
    assert (stream, alias) == (0, 9)
    assert "has no corpus 'nowhere'" in message
    assert len(driven.worker.roster) == 1


def test_a_memory_that_fails_costs_the_session_and_not_the_service(
    driven: Driven, follow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def lookup(self, *args: Any, **given: Any) -> None:
            raise RuntimeError("disk on fire")

    driven.past.memory = lambda tenant: Broken()
    driven(follow(PROMPT), follow(PROMPT, alias=2, session="other"))
    assert [why for _, _, why in driven.refusals] == [
        "the retrieval service failed on this session; its log says why"
    ] * 2
    assert driven.worker.counts.failed_sessions == 2
    assert "disk on fire" in caplog.text


def test_an_earlier_turn_that_was_forgotten_is_not_learnt_when_it_comes_back_behind_a_later_one(
    driven: Driven, follow: Any
) -> None:
    driven(follow(PROMPT), progress([1, 2, 3, 50], 1))
    driven.worker.unlearn("t", "s")
    turn = [1, 2, 3, 50, 60, 61]
    driven(follow(turn, alias=2, epoch=8), progress([*turn, 70], 1, alias=2))
    driven(follow([1, 2, 3, 50], alias=3, epoch=9, prompt_length=3), progress([1, 2, 3, 50, 51], 1, alias=3))
    assert list(driven.past.outputs.values()) == [[50, 70]]
