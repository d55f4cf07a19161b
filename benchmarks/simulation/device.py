"""A simulated client's device: drafts for its own request, well, badly, or with ill intent.

Some send old windows again; some draft for another session.

It speaks the real messages on the request's stream, late and out of step like any device.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from benchmarks.simulation.request_checker import RequestChecker
from benchmarks.simulation.toy import VOCABULARY, hash_of, next_id
from outrider.v1 import generation_pb2
from speculative.hashing import extend
from speculative.noise import derive

LONGEST = 8
"""Nodes of a drafted window."""
RIGHT = {"good": 0.9, "useless": 0.0, "hostile": 0.5, "replaying": 0.5, "claiming": 1.0}
"""Share of drafted tokens that are the target's own, by the kind of device."""
THINK_S = 0.003
"""Seconds that a window takes."""
REPLAYED = 4
"""Old windows that a replaying device sends again beside each new one."""


class SimulatedDevice:
    """The device of one stream.

    Args:
        call: the stream; the device writes to it.
        seed: the request's.
        spawn: starts a task of the client's process.
        past: windows that the device has sent on all streams of its request, to which it adds.
    """

    def __init__(
        self,
        kind: str,
        call: Any,
        seed: int,
        checker: RequestChecker,
        chance: random.Random,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        past: list[generation_pb2.GenerateRequest],
    ) -> None:
        self._kind = kind
        self._call = call
        self._seed = seed
        self._checker = checker
        self._chance = chance
        self._spawn = spawn
        self._past = past
        self._epoch = 0

    def message(self, response: generation_pb2.GenerateResponse) -> None:
        """Takes the stream's next message, which the request's checker has seen."""
        epoch = response.started.epoch or response.tokens.epoch
        self._epoch = max(self._epoch, epoch)
        for choice, ids in enumerate(self._checker.ids):
            if choice not in self._checker.ended:
                text = [*self._checker.prompt, *ids]
                if self._kind == "claiming":
                    text[0] ^= 1  # of a session whose text has the same length
                self._past.append(self._window(choice, text))
                self._spawn(self._send(self._past[-1]))
        if self._kind == "replaying":
            for old in self._chance.choices(self._past, k=REPLAYED if self._past else 0):
                self._spawn(self._send(old))

    async def _send(self, request: generation_pb2.GenerateRequest) -> None:
        await asyncio.sleep(THINK_S * self._chance.random())
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over

    def _window(self, choice: int, ids: list[int]) -> generation_pb2.GenerateRequest:
        """A drafted chain, which sometimes begins a little ahead of the committed tokens."""
        chance, seed = self._chance, derive(self._seed, choice)
        hash_, base = hash_of(ids), len(ids)
        for _ in range(chance.choice((0, 0, 0, 1, 4))):
            hash_ = extend(hash_, next_id(hash_, seed))
            base += 1
        drafts = generation_pb2.DeviceDrafts(
            base=base,
            prefix_hash=hash_,
            survival=bytes([230] * LONGEST),
            epoch=chance.choice((0, self._epoch)),
            choice=choice,
        )
        for _ in range(LONGEST):
            right = chance.random() < RIGHT[self._kind]
            drafts.ids.append(next_id(hash_, seed) if right else chance.randrange(VOCABULARY))
            hash_ = extend(hash_, drafts.ids[-1])
        if self._kind == "hostile" and chance.random() < 0.3:
            return self._rubbish(drafts)
        if self._kind == "claiming" and chance.random() < 0.1:
            return generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(session="s0", seed=1))
        return generation_pb2.GenerateRequest(drafts=drafts)

    def _rubbish(self, drafts: generation_pb2.DeviceDrafts) -> generation_pb2.GenerateRequest:
        match self._chance.randrange(6):
            case 0:
                drafts.ids[0] = VOCABULARY + 1
            case 1:
                drafts.epoch = self._chance.getrandbits(64)
            case 2:
                drafts.choice = 7
            case 3:
                drafts.parents = bytes([9] * LONGEST)
            case 4:
                drafts.prefix_hash = self._chance.getrandbits(64)
            case _:
                return generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(seed=1))
        return generation_pb2.GenerateRequest(drafts=drafts)
