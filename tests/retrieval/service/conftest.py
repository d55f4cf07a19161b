"""What these tests share: a memory that knows a text, and requests for sessions."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.source.events import DecodingRequest, Follow
from outrider.wire.codec import SessionKey
from retrieval_service.trie import CountedTrie, Memory, counted
from speculative.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent / "support"))

WIDTH = 1000


class Text:
    """A Memory that finds the longest suffix by trying every place."""

    def __init__(self, *documents: Sequence[int]) -> None:
        self.documents = [list(document) for document in documents]

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        for length in range(len(ids), 0, -1):
            tail = list(ids[-length:])
            found = [
                document[at + length : at + length + depth]
                for document in self.documents
                for at in range(len(document) - length)
                if document[at : at + length] == tail
            ]
            if found:
                return counted(found, length, node_limit)
        return None


class Past:
    """A PastMemory that records its calls."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[str, str], list[int]] = {}
        self.finished: list[tuple[str, str]] = []
        self.tokens = 0

    def extend(self, tenant: str, session: str, ids: Sequence[int]) -> bool:
        self.outputs.setdefault((tenant, session), []).extend(ids)
        self.tokens += len(ids)
        return True

    def finish(self, tenant: str, session: str) -> None:
        self.finished.append((tenant, session))

    def memory(self, tenant: str) -> Memory:
        return Text(*[ids for (owner, _), ids in self.outputs.items() if owner == tenant])

    def stats(self) -> "Past":
        return self


def make_request(ids: Sequence[int], **given: Any) -> DecodingRequest:
    """A request for greedy decoding that drafts from all of the service's memories."""
    values: dict[str, Any] = {
        "epoch": 7,
        "ids": tuple(ids),
        "prompt_length": len(ids),
        "limit": 500,
        "params": SamplingParams(temperature=0),
        "seed": 11,
        "node_limit": 64,
        "vocabulary_size": WIDTH,
        "sources": ("corpus", "past", "dense"),
        "learn": True,
    }
    return DecodingRequest(**(values | given))


def make_follow(ids: Sequence[int], alias: int = 1, stream: int = 0, **given: Any) -> Follow:
    """A follow of session "s" of tenant "t", unless the arguments say otherwise."""
    key = SessionKey(given.pop("tenant", "t"), given.pop("session", "s"))
    return Follow(stream, alias, key, make_request(ids, **given))


@pytest.fixture(scope="session")
def text() -> type[Text]:
    """A memory of some documents."""
    return Text


@pytest.fixture
def past() -> Past:
    """Empty past outputs."""
    return Past()


@pytest.fixture(scope="session")
def follow() -> Callable[..., Follow]:
    """A factory of follows."""
    return make_follow


@pytest.fixture(scope="session")
def request_for() -> Callable[..., DecodingRequest]:
    """A factory of requests for decoding."""
    return make_request
