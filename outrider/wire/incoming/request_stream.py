"""The requests of one stream, at a pace that leaves the event loop to others.

A peer may send messages as fast as the connection takes them. Each stream has an account of processor time,
which fills with the clock; a stream that has overdrawn its account is read again once the account is even.
Meanwhile gRPC's flow control makes the peer wait.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Self

from outrider.wire.incoming.unparsed import Unparsed

SHARE = 0.25
"""Part of the event loop's time that one stream's requests may take for long."""
BURST_S = 0.25
"""The most processor time that a stream saves up, in seconds."""
MESSAGE_S = 100e-6
"""What reading one message is taken to cost, in seconds of processor time."""
BYTE_S = 3e-9
"""What each byte of a message is taken to cost beside that."""


class Pace:
    """One stream's account of processor time. Pure: the caller passes the time and sleeps."""

    def __init__(self, now: float) -> None:
        self._saved_s = BURST_S
        self._filled_at = now

    def charge(self, cost_s: float, now: float) -> float:
        """Takes a cost out of the account; returns for how many seconds the stream has to wait."""
        self._saved_s = min(BURST_S, self._saved_s + (now - self._filled_at) * SHARE) - cost_s
        self._filled_at = now
        return max(0.0, -self._saved_s) / SHARE


class RequestStream:
    """Iterator over the requests of one stream.

    Args:
        requests: of gRPC.
        peer: the caller's address, for the log.
        read: turns what came into what the method takes.
    """

    def __init__(
        self, requests: AsyncIterable[Any], peer: Callable[[], str], read: Callable[[Any], Awaitable[Any]]
    ) -> None:
        self._requests = requests
        self._messages: AsyncIterator[Any] | None = None
        self._peer = peer
        self._read = read
        self._pace = Pace(time.monotonic())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:  # not before: gRPC warns of an iterator that nobody asks
            self._messages = aiter(self._requests)
        request = await anext(self._messages)
        if isinstance(request, Unparsed):
            request.peer = self._peer()
            wait_s = self._pace.charge(MESSAGE_S + len(request.data) * BYTE_S, time.monotonic())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
        return await self._read(request)
