"""A client's device in a chaos run: it drafts along its stream, well, badly and against the rules."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import grpc.aio

from outrider.v1 import generation_pb2
from speculative.errors import Unavailable
from speculative.hashing import prefix_hash

WINDOW = 8
WAIT_MS = 50
"""Milliseconds for which the device asks rounds to wait for its drafts."""
WRONG_EVERY = 3
"""Number of windows of which one is wrong from its fourth token on."""
LOST_AFTER = 4
"""Windows that a device sends before it sleeps, vanishes or resumes twice."""
ASLEEP_S = 8.0
"""Seconds for which a device that sleeps reads nothing."""


class DeviceFault(StrEnum):
    """What is wrong with a device."""

    NONE = "none"
    REPLAYS = "replays"
    """It sends each window a second time later on."""
    CLAIMS = "claims"
    """It drafts behind the text of another session, and at last asks for that session on its own stream."""
    VANISHES = "vanishes"
    """Its connection is gone in the middle of its windows; it comes back at once."""
    SLEEPS = "sleeps"
    """It reads nothing for a while, and then its connection is gone."""
    TWICE = "twice"
    """Its connection is gone, and it resumes twice at once."""


LOSING = frozenset({DeviceFault.VANISHES, DeviceFault.SLEEPS, DeviceFault.TWICE})
"""Faults by which a device loses its connection once."""


class DeviceCall:
    """A Generate call of one choice whose client drafts its golden ids.

    Args:
        call: the open call; nothing was written to it.
        golden: ids of the prompt and the answer.
        fault: what is wrong with the device on this call.
        happened: called when the fault happens, once at most.
    """

    def __init__(
        self,
        call: Any,
        request: generation_pb2.GenerateRequest,
        golden: Sequence[int],
        fault: DeviceFault = DeviceFault.NONE,
        happened: Callable[[], None] = lambda: None,
    ) -> None:
        self._call = call
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.start.device.wait_ms = WAIT_MS
        self._golden = tuple(golden)
        self._fault = fault
        self._happened = happened
        self._epoch = 0
        self._sent: list[generation_pb2.GenerateRequest] = []

    async def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        await self._write(self._request)
        async for response in self._call:
            yield response
            if epoch := response.started.epoch or response.tokens.epoch:
                self._epoch = epoch
            if response.HasField("tokens"):
                tokens = response.tokens
                await self._draft(tokens.position + len(tokens.ids))
            if self._fault in LOSING and len(self._sent) == LOST_AFTER:
                await self._lose()

    def cancel(self) -> None:
        """Cancels the call."""
        self._call.cancel()

    async def _lose(self) -> None:
        self._happened()
        if self._fault is DeviceFault.SLEEPS:
            await asyncio.sleep(ASLEEP_S)
        self._call.cancel()
        raise Unavailable("the device lost its connection")

    async def _draft(self, base: int) -> None:
        ids = list(self._golden[base : base + WINDOW])
        if not ids:
            return
        if (len(self._sent) + 1) % WRONG_EVERY == 0:
            ids[3:] = [id_ ^ 1 for id_ in ids[3:]]
        before = list(self._golden[:base])
        if self._fault is DeviceFault.CLAIMS:
            before[0] ^= 1
        drafts = generation_pb2.DeviceDrafts(
            base=base,
            prefix_hash=prefix_hash(before),
            ids=ids,
            survival=bytes([200] * len(ids)),
            epoch=self._epoch,
        )
        self._sent.append(generation_pb2.GenerateRequest(drafts=drafts))
        await self._write(self._sent[-1])
        await self._misbehave()

    async def _misbehave(self) -> None:
        """Sends what no working device would send, beside the latest window."""
        sent = len(self._sent)
        if self._fault is DeviceFault.REPLAYS and sent > 1:
            if sent == LOST_AFTER:
                self._happened()
            await self._write(self._sent[sent // 2])
        if self._fault is DeviceFault.CLAIMS and sent == LOST_AFTER:
            self._happened()
            claimed = generation_pb2.GenerateStart(session="chaos-0-0", seed=1, max_tokens=1)
            await self._write(generation_pb2.GenerateRequest(start=claimed))

    async def _write(self, request: generation_pb2.GenerateRequest) -> None:
        # If the call is over, reading from it raises the reason.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)


async def first_difference_of(call: DeviceCall, golden: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """Reads a call to its end; returns the first position whose ids are not golden, and these ids; or None.

    Args:
        golden: ids of the prompt and the answer.
    """
    with suppress(grpc.aio.AioRpcError):
        async for response in call:
            tokens = response.tokens
            end = tokens.position + len(tokens.ids)
            if tuple(tokens.ids) != tuple(golden[tokens.position : end]):
                return tokens.position, tuple(tokens.ids)
    return None
