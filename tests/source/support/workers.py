"""Workers of every source in this repository, driven step by step, without their threads."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drafter_service.draft_tree import Growth
from drafter_service.worker import DrafterWorker
from outrider.source.events import DecodingRequest, Follow, Outgoing, Progress
from outrider.source.followed import SourceProfile
from outrider.source.worker import SourceWorker
from outrider.wire.codec import SessionKey
from retrieval_service.catalogue import Catalogue
from retrieval_service.ranking import DraftShape
from retrieval_service.trie import CountedTrie, counted
from retrieval_service.worker import RetrievalWorker
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.drafter.support.fake_drafter import WIDTH, FakeDrafter

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/examples/last_time.py"
PROMPT = (3, 1, 4, 1, 5, 9, 3, 1)
"""Ids that end as they began, so that a lookup has something to say."""
GRACE_S = 10.0
MAX_LENGTH = 40


class Repeating:
    """A memory of documents that says of any ids what follows an id in PROMPT; a NearMemory too."""

    count = 1

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        if not ids:
            return None
        known = PROMPT.index(ids[-1]) if ids[-1] in PROMPT else 0
        return counted([PROMPT[known + 1 : known + 1 + depth]], 8, node_limit)

    def follow(self, session: Any, tenant: str, ids: Sequence[int]) -> "Repeating":
        return self

    def progress(self, session: Any, ids: Sequence[int]) -> None:
        pass

    def end(self, session: Any) -> None:
        pass


def drafter(profile: SourceProfile, publish: Any, clock: Callable[[], float]) -> DrafterWorker:
    growth = Growth(children=2, scale=1.0, floor=0.05, depth=3)
    return DrafterWorker(
        FakeDrafter(), profile, publish, growth=growth, nodes_per_pass=2, chunk=100, clock=clock
    )


def retrieval(profile: SourceProfile, publish: Any, clock: Callable[[], float]) -> RetrievalWorker:
    def observe(name: str, seconds: float) -> None:
        assert name == "dense"

    catalogue = Catalogue(None, Repeating())
    return RetrievalWorker(catalogue, profile, publish, observe, shape=DraftShape(), clock=clock)


def example(profile: SourceProfile, publish: Any, clock: Callable[[], float]) -> SourceWorker[Any]:
    """The worker of docs/write-a-source.md."""
    spec = importlib.util.spec_from_file_location("last_time", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worker: SourceWorker[Any] = module.LastTime(profile, publish, clock=clock)
    return worker


WORKERS: dict[str, Callable[..., SourceWorker[Any]]] = {
    "drafter": drafter,
    "retrieval": retrieval,
    "example": example,
}


def request_for(ids: Sequence[int], **given: Any) -> DecodingRequest:
    """A request for greedy decoding that uses one source name."""
    values: dict[str, Any] = {
        "epoch": 7,
        "ids": tuple(ids),
        "prompt_length": min(len(ids), len(PROMPT)),
        "limit": 200,
        "params": SamplingParams(temperature=0),
        "seed": 11,
        "node_limit": 64,
        "vocabulary_size": WIDTH,
        "sources": ("dense",),
    }
    return DecodingRequest(**(values | given))


class Driven:
    """A worker, what it sent and refused, and a clock."""

    def __init__(self, source: str, max_sessions: int = 8) -> None:
        self.now = 0.0
        self.sent: list[tuple[int, int, Fragment]] = []
        self.refused: list[tuple[int, int, str]] = []
        profile = SourceProfile(
            "source",
            "a model",
            readable_ids=WIDTH,
            max_length=MAX_LENGTH,
            max_sessions=max_sessions,
            grace_s=GRACE_S,
        )
        self.worker = WORKERS[source](profile, self._take, lambda: self.now)

    def _take(self, outgoing: dict[int, Outgoing]) -> None:
        for stream, what in outgoing.items():
            self.sent += [(stream, alias, fragment) for alias, fragment in what.drafts]
            self.refused += [(stream, alias, message) for alias, message in what.refusals]

    def __call__(self, *events: Any) -> list[tuple[int, int, Fragment]]:
        """Takes events in and works until nothing is left; returns (stream, alias, draft)."""
        self.sent.clear()
        self.refused.clear()
        for event in events:
            self.worker.submit(event)
        self.worker.take_in(wait=False)
        while self.worker.work():
            pass
        return list(self.sent)


def follow(
    alias: int, ids: Sequence[int] = PROMPT, *, stream: int = 0, session: str = "", **given: Any
) -> Follow:
    """A follow of session "s<alias>", unless another one is named."""
    return Follow(stream, alias, SessionKey("t", session or f"s{alias}"), request_for(ids, **given))


def progress(alias: int, before: Sequence[int], ids: Sequence[int], *, stream: int = 0) -> Progress:
    """The target has committed `ids` after those before."""
    return Progress(stream, alias, len(before), tuple(ids), prefix_hash([*before, *ids]))
