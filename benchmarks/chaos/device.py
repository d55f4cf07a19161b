"""A client's device in a chaos run: it drafts along its request's stream, right and wrong."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio

from outrider.v1 import generation_pb2
from speculative.hashing import prefix_hash

WINDOW = 8
WAIT_MS = 50
"""Milliseconds for which the device asks rounds to wait for its drafts."""
WRONG_EVERY = 3
"""Number of windows of which one is wrong from its fourth token on."""


class DeviceCall:
    """A Generate call of one choice whose client drafts its golden ids.

    Args:
        call: the open call; nothing was written to it.
        golden: ids of the prompt and the answer.
    """

    def __init__(self, call: Any, request: generation_pb2.GenerateRequest, golden: Sequence[int]) -> None:
        self._call = call
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.start.device.wait_ms = WAIT_MS
        self._golden = tuple(golden)
        self._epoch = 0
        self._sent = 0

    async def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        await self._write(self._request)
        async for response in self._call:
            yield response
            if epoch := response.started.epoch or response.tokens.epoch:
                self._epoch = epoch
            if response.HasField("tokens"):
                tokens = response.tokens
                await self._draft(tokens.position + len(tokens.ids))

    def cancel(self) -> None:
        """Cancels the call."""
        self._call.cancel()

    async def _draft(self, base: int) -> None:
        ids = list(self._golden[base : base + WINDOW])
        if not ids:
            return
        self._sent += 1
        if self._sent % WRONG_EVERY == 0:
            ids[3:] = [id_ ^ 1 for id_ in ids[3:]]
        drafts = generation_pb2.DeviceDrafts(
            base=base,
            prefix_hash=prefix_hash(self._golden[:base]),
            ids=ids,
            survival=bytes([200] * len(ids)),
            epoch=self._epoch,
        )
        await self._write(generation_pb2.GenerateRequest(drafts=drafts))

    async def _write(self, request: generation_pb2.GenerateRequest) -> None:
        # If the call is over, reading from it raises the reason.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)
