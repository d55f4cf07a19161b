"""The streams under fire: what each asks, its golden output, and a client that notes every message it gets.

The client is the library's own, given all orchestrators: it goes on by itself where one is lost. Knows
nothing of faults.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from chaos_figures import Track

from outrider.client.async_client import AsyncClient, AsyncStream
from outrider.client.endpoints import addresses_in, ping_patience_ms
from outrider.client.options import build_request
from outrider.client.resuming import Resuming
from outrider.v1 import common_pb2, explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from speculative.errors import OutriderError

PATIENCE_S = 60.0
ENDS_S = 90.0
"""How long a stream may take after the last fault until it counts as lost."""
EXPLAIN_S = 2.0
SAID = 24
"""Ids that the user adds between two turns."""
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "learn": True},
    {"temperature": 0.8, "turns": 3},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.0, "turns": 3},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "speculation": False},
    {"temperature": 0.9, "top_k": 40, "presence_penalty": 0.3, "turns": 2},
)
"""What streams ask for, in turn; with several turns they are conversations. What is learnt comes back as
drafts that are right throughout, so few learn: a stream that is over in a moment is hard to hit."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, or a single request, with what it has to give."""

    prompts: tuple[tuple[int, ...], ...]
    """Per turn: the whole prompt, earlier turns included."""
    golden: tuple[tuple[tuple[int, ...], ...], ...]
    """Per turn, per choice: the ids."""
    options: dict[str, Any]


def scripts(prompts: Sequence[Sequence[int]], streams: int, tokens: int) -> list[dict[str, Any]]:
    """What each stream asks, in `said` per turn; as many as streams. Pure."""
    asked = []
    for number in range(streams):
        way = dict(WAYS[number % len(WAYS)])
        turns = way.pop("turns", 1)
        first, *more = (prompts[(number + turn) % len(prompts)] for turn in range(turns))
        own = {"seed": 1000 + number, "max_tokens": tokens, "ignore_eos": True}
        options = {"learn": False} | way | own
        asked.append({"said": [tuple(first), *(tuple(ids[:SAID]) for ids in more)], "options": options})
    return asked


async def golden_talk(client: AsyncClient, script: dict[str, Any], repeats: int) -> Talk:
    """A script with its golden output: decoded plainly, while nobody is harmed.

    Raises RuntimeError where repeats differ, as nothing could be compared with such an output.
    """
    options = script["options"]
    prompts, golden = [], []
    so_far: tuple[int, ...] = ()
    for said in script["said"]:
        so_far += said
        asked = options | {"ids": so_far, "speculation": False, "learn": False}
        answers = [await client.generate(**asked) for _ in range(repeats)]
        ids = {tuple(choice.ids for choice in answer.choices) for answer in answers}
        if len(ids) > 1:
            raise RuntimeError(f"plain decoding gives other ids each time, with {options}")
        prompts.append(so_far)
        golden.append(ids.pop())
        so_far += golden[-1][0]
    return Talk(tuple(prompts), tuple(golden), options)


class Watched:
    """A call whose responses are noted as they pass."""

    def __init__(self, call: Any, track: Track, now: Callable[[], float]) -> None:
        self._call = call
        self._track = track
        self._now = now

    async def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in self._call:
            if response.HasField("started"):
                self._track.started(response.started.epoch)
            elif response.HasField("tokens"):
                told = response.tokens
                self._track.tokens(self._now(), told.choice, told.position, len(told.ids), told.epoch)
            yield response

    def cancel(self) -> None:
        """Ends it."""
        self._call.cancel()


class Riders:
    """Streams that run side by side, each its talk over and over, until told to stop."""

    def __init__(self, addresses: str, talks: Sequence[Talk]) -> None:
        """`addresses` of all orchestrators. Use inside one event loop; `close` at the end."""
        several = addresses_in(addresses)
        self._channels = [open_channel(one, patience_ms=ping_patience_ms(several)) for one in several]
        self._stubs = [GenerationStub(channel) for channel in self._channels]
        self._talks = talks
        self._began = time.monotonic()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.tracks: list[Track] = []
        """Of every stream that was asked for."""

    def now(self) -> float:
        """Seconds since the streams began."""
        return time.monotonic() - self._began

    def golden(self) -> dict[str, Sequence[Sequence[int]]]:
        """What the streams should give, by the first part of their names."""
        return {
            f"{number}.{turn}": ids
            for number, talk in enumerate(self._talks)
            for turn, ids in enumerate(talk.golden)
        }

    def start(self) -> None:
        """All begin; returns at once."""
        self._began = time.monotonic()
        self._tasks = [asyncio.create_task(self._ride(number)) for number in range(len(self._talks))]

    async def finish(self) -> None:
        """No stream begins any more; returns when all have ended, or have had ENDS_S for it."""
        self._stopping = True
        _, late = await asyncio.wait(self._tasks, timeout=ENDS_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Ends what still runs, and the connections."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def _ride(self, number: int) -> None:
        talk = self._talks[number]
        lap = 0
        while not self._stopping:
            for turn, prompt in enumerate(talk.prompts):
                if self._stopping:
                    return
                track = Track(f"{number}.{turn}/{lap}", len(prompt), self.now())
                self.tracks.append(track)
                request = talk.options | {"ids": prompt, "session": f"chaos-{number}-{lap}"}
                await self._stream(track, request, first=number + lap)
            lap += 1

    async def _stream(self, track: Track, options: dict[str, Any], first: int) -> None:
        """One stream to its end; what becomes of it is in its track."""
        request = build_request(None, options)

        def ask(resuming: Resuming) -> Any:
            track.asked += 1
            call = self._stubs[resuming.orchestrator].Generate(iter((resuming.request,)))
            return Watched(call, track, self.now)

        try:
            resuming = Resuming(request, len(self._stubs), PATIENCE_S, first)
            async with AsyncStream(ask, resuming, options.get("n", 1)) as stream:
                completion = await stream.completion()
            track.completion = [choice.ids for choice in completion.choices]
            track.recoveries = completion.usage.recoveries
            await self._look(track, str(options["session"]), self._stubs[resuming.orchestrator])
        except asyncio.CancelledError:
            track.error = f"still running {ENDS_S:g} s after the last fault"
        except OutriderError as error:
            track.error = f"{type(error).__name__}: {error}"

    async def _look(self, track: Track, session: str, stub: GenerationStub) -> None:
        """How long verifiers that went on with it took to read its ids, where they are there to tell."""
        for switch in track.switches:
            key = common_pb2.SessionKey(tenant="default", session=session, choice=switch.choice)
            with suppress(grpc.RpcError):
                told = await stub.Explain(explain_pb2.ExplainRequest(key=key), timeout=EXPLAIN_S)
                for one in told.incarnations:
                    if one.epoch == switch.epoch and one.rounds and not one.forgotten:
                        first = one.rounds[0]
                        read_s = (first.at_ms + first.forward_ms) / 1000
                        track.computed_s[switch.choice, switch.epoch] = read_s
