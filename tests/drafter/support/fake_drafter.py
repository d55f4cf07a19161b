"""A drafter whose logits are a function of the ids that its cache holds, and sessions over it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafter_service.draft_tree import Growth, Rerooted
from drafter_service.drafters import Drafter
from drafter_service.session import Abilities, Cache, DraftingSession, PassRows
from outrider.source.events import DecodingRequest, Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.wire.codec import SessionKey
from speculative.errors import Overloaded
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams

WIDTH = 24


@dataclass(eq=False)
class FakeCache:
    """Keeps ids where a model keeps keys and values, under the same bookkeeping."""

    length: int = 0
    ids: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    def commit(self, path: Sequence[int]) -> list[int]:
        above = -1
        for node in path:
            assert self.nodes[node][1] == above, "a path is a chain from the last committed id"
            above = node
        kept: dict[int, int] = {}
        for node, (_, parent) in enumerate(self.nodes):
            if parent in kept or parent == path[-1]:
                kept[node] = len(kept)
        self.ids = [*self.committed, *(self.nodes[node][0] for node in path)]
        self.length = len(self.ids)
        mapping = [kept.get(node, -1) for node in range(len(self.nodes))]
        self.nodes = [(self.nodes[node][0], kept.get(self.nodes[node][1], -1)) for node in kept]
        return mapping

    def drop_nodes(self) -> None:
        self.nodes = []

    @property
    def committed(self) -> list[int]:
        return self.ids[: self.length]

    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node >= 0:
            token, node = self.nodes[node]
            tokens.insert(0, token)
        return [*self.committed, *tokens]


class FakeDrafter:
    """Random logits, the same for the same ids, wherever they lie in a cache or a batch."""

    model = "fake"
    tokenizer_digest = ""
    numerics = "numpy float32"

    def __init__(self, *, room: int = 1 << 20, max_length: int = 200, sharpness: float = 2.0) -> None:
        self.abilities = Abilities(width=WIDTH, bound=WIDTH, max_length=max_length)
        self.room = room
        self.sharpness = sharpness
        self.passes: list[int] = []
        self.caches: list[FakeCache] = []
        self.is_shut_down = False

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """float32[WIDTH] after these ids."""
        drawn = np.random.Generator(np.random.PCG64(prefix_hash(ids))).standard_normal(WIDTH)
        return (drawn * self.sharpness).astype(np.float32)

    def open(self, reserve: int) -> FakeCache:
        if self.cached_tokens + reserve > self.room:
            raise Overloaded(f"{reserve} slots wanted", retry_after_s=1)
        self.caches.append(FakeCache())
        return self.caches[-1]

    def close(self, cache: Cache) -> None:
        assert isinstance(cache, FakeCache)
        cache.closed = True

    def rewind(self, cache: Cache, length: int) -> None:
        cache.drop_nodes()
        cache.length = length

    def forward(self, batch: Sequence[tuple[Cache, PassRows]]) -> NDArray[np.float32]:
        self.passes.append(sum(len(rows.tokens) for _, rows in batch))
        wanted = []
        for cache, rows in batch:
            assert isinstance(cache, FakeCache)
            assert not cache.closed
            low = len(cache.nodes)
            cache.nodes.extend(zip(rows.tokens, rows.parents, strict=True))
            wanted.extend(self.logits(cache.path(low + row)) for row in rows.want)
        return np.array(wanted, dtype=np.float32).reshape(len(wanted), WIDTH)

    def shut_down(self) -> None:
        self.is_shut_down = True

    @property
    def cached_tokens(self) -> int:
        return sum(cache.length for cache in self.caches if not cache.closed)


def make_request(ids: Sequence[int], **given: object) -> DecodingRequest:
    """A plain request for greedy decoding, in the fake drafter's vocabulary."""
    values: dict[str, object] = {
        "epoch": 7,
        "ids": tuple(ids),
        "prompt_length": len(ids),
        "limit": 150,
        "params": SamplingParams(temperature=0),
        "seed": 11,
        "node_limit": 1000,
        "vocabulary_size": WIDTH,
    }
    return DecodingRequest(**(values | given))  # type: ignore[arg-type]


def session_of(
    request: DecodingRequest, cache: Cache, abilities: Abilities, growth: Growth
) -> DraftingSession:
    """A session of a model with these abilities."""
    profile = SourceProfile(
        "fake", "fake", readable_ids=abilities.width, max_length=abilities.max_length, noun="drafter"
    )
    ids = FollowedIds(request.ids, request.vocabulary_size, profile)
    return DraftingSession(Follow(0, 1, SessionKey("t", "s"), request), ids, cache, abilities, growth)


def report(session: DraftingSession, position: int, ids: Sequence[int], hash_: int) -> Rerooted:
    """The target has committed these ids from `position` on."""
    return session.commit(session.ids.extend(position, ids, hash_))


def run_pass(drafter: Drafter, *sessions: DraftingSession, nodes: int = 1, chunk: int = 1000) -> int:
    """One pass over these sessions; returns its rows."""
    batch = [(session, rows) for session in sessions if (rows := session.plan(nodes, chunk)) is not None]
    if not batch:
        return 0
    logits = drafter.forward([(session.cache, rows) for session, rows in batch])
    low = 0
    for session, rows in batch:
        session.grow(rows, logits[low : low + len(rows.want)])
        low += len(rows.want)
    return sum(len(rows.tokens) for _, rows in batch)
