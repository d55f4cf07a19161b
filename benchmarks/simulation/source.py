"""A simulated draft source that knows the toy model and is wrong at a given rate.

It speaks Attach with the real messages, late and out of step like any drafter.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation.calls import Server
from benchmarks.simulation.clock import Process
from benchmarks.simulation.network import Network
from benchmarks.simulation.toy import VOCABULARY, hash_of, next_id
from outrider.source.events import Follow, MalformedFollow, Progress, SessionEnded
from outrider.source.messages import events_from_wire
from outrider.v1 import draft_source_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceServicer, add_DraftSourceServicer_to_server
from outrider.wire.codec import fragment_to_wire
from outrider.wire.observed import observed_from_wire
from speculative.fragment import Fragment
from speculative.hashing import extend
from speculative.observed import Observed
from speculative.tree import ROOT

NAME = "drafter"
LONGEST = 4
"""Nodes of a drafted chain."""
TOPS = 2
"""The target's likeliest ids that it wants of each row."""


@dataclass(frozen=True, slots=True)
class SourceShape:
    """How good, how fast and how correct a source's drafts are."""

    right: float = 0.8
    """Share of drafted tokens that are the target's own."""
    think_s: float = 0.004
    """Seconds that a draft takes."""
    malformed: float = 0.0
    """Share of fragments that are malformed."""


@dataclass(slots=True)
class _Followed:
    ids: list[int]
    epoch: int
    seed: int
    limit: int


class SimulatedSource(DraftSourceServicer):
    """One incarnation of a source's process."""

    def __init__(
        self,
        network: Network,
        address: str,
        shape: SourceShape,
        chance: random.Random,
        counts: Counter[str],
    ) -> None:
        self.process = Process(network.loop, address)
        self._shape = shape
        self._loop = network.loop
        self._swapped_at = 0.0
        self._chance = chance
        self._counts = counts
        listening: Any = Server(network, self.process, address)
        add_DraftSourceServicer_to_server(self, listening)

    async def Describe(self, request: Any, context: Any) -> draft_source_pb2.SourceDescription:
        return draft_source_pb2.SourceDescription(
            name=NAME, model="toy", vocabulary_size=VOCABULARY, max_length=1 << 20, tops=TOPS
        )

    async def Attach(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[draft_source_pb2.AttachResponse]:
        followed: dict[int, _Followed] = {}
        async for request in requests:
            touched = self._take(request, followed)
            await asyncio.sleep(max(self._shape.think_s, self._swapped_at - self._loop.now))
            drafts = [
                fragment_to_wire(self._draft(followed[alias]), alias)
                for alias in touched
                if alias in followed and len(followed[alias].ids) < followed[alias].limit - 1
            ]
            if drafts:
                yield draft_source_pb2.AttachResponse(drafts=drafts)

    def _take(self, request: Any, followed: dict[int, _Followed]) -> dict[int, None]:
        touched: dict[int, None] = {}
        for event in events_from_wire(request, 0, model="toy", tokenizer_digest=""):
            match event:
                case Progress(_, alias, position, ids, hash_, tops, off_path):
                    known = followed.get(alias)
                    if known is not None:
                        assert position <= len(known.ids), "a stream loses nothing"
                        known.ids[position:] = ids
                        assert hash_of(known.ids) == hash_, "progress and its hash differ"
                        self._check(known, observed_from_wire(tops, off_path, TOPS))
                        touched[alias] = None
                case SessionEnded(_, alias):
                    followed.pop(alias, None)
                case Follow(_, alias, _, asked):
                    self._counts[f"followed by {self.process.name}"] += 1
                    followed[alias] = _Followed(list(asked.ids), asked.epoch, asked.seed, asked.limit)
                    touched[alias] = None
                case MalformedFollow():
                    raise AssertionError(f"a verifier sent {event}")
        return touched

    def _check(self, known: _Followed, said: Observed) -> None:
        """Checks that what the target is said to have said is what it says."""
        first = len(known.ids) - len(said.tops)
        for place, top in enumerate(said.tops, start=first):
            assert top.ids[0] == known.ids[place], "the likeliest id is not the one that was committed"
        for row in said.off_path:
            assert row.token == row.top_ids[0] == next_id(row.prefix_hash, known.seed)
        self._counts["rows told"] += len(said.tops) + len(said.off_path)

    def _draft(self, session: _Followed) -> Fragment:
        """A drafted chain, which sometimes begins a little ahead of the committed tokens."""
        chance, shape = self._chance, self._shape
        hash_, base = hash_of(session.ids), len(session.ids)
        if chance.random() < 0.2:
            for _ in range(chance.randint(1, 2)):
                hash_ = extend(hash_, next_id(hash_, session.seed))
                base += 1
        start, tokens = hash_, []
        for _ in range(LONGEST):
            right = chance.random() < shape.right
            tokens.append(next_id(hash_, session.seed) if right else chance.randrange(VOCABULARY))
            hash_ = extend(hash_, tokens[-1])
        if chance.random() < shape.malformed:
            tokens[-1] = VOCABULARY + 1
        survival = tuple(0.8 ** (depth + 1) for depth in range(LONGEST))
        return Fragment(
            1, session.epoch, base, start, tuple(tokens), tuple(range(ROOT, LONGEST - 1)), survival
        )

    def swap(self, seconds: float) -> None:
        """Drafts nothing for `seconds`, then with other weights: better ones for bad ones, and the reverse.

        The sessions stay, as at a drafter that has learnt.
        """
        self._swapped_at = self._loop.now + seconds
        self._shape = replace(self._shape, right=0.95 - self._shape.right)

    def left(self) -> dict[str, int]:
        """Nothing, as a source keeps nothing beyond a stream."""
        return {}
