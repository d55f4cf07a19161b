"""The messages of one stream, at a pace that leaves the event loop to others.

A peer may send messages as fast as the connection takes them. Each stream has an account of processor time,
which fills with the clock; a stream that has overdrawn its account is read again once the account is even.
Meanwhile gRPC's flow control makes the peer wait. Streams that are overdrawn at once share what one may take,
however many a peer has opened.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from outrider.wire.incoming.unparsed import Unparsed

SHARE = 0.1
"""Largest lasting share of the event loop's time for reading the messages of all streams that send too many.
Answers may take as long again, and in a verifier the engine's thread waits for the interpreter then."""
BURST_S = 0.1
"""The most processor time that a stream saves up, in seconds."""
FIRST_S = 0.01
"""The most processor time that a stream may spend as it begins, in seconds."""
MESSAGE_S = 100e-6
"""What reading one message is taken to cost, in seconds of processor time."""
BYTE_S = 3e-9
"""What each byte of a message is taken to cost beside that."""
LEAST_S = 2 * MESSAGE_S
"""What every stream may spend as it begins: one message of up to 32 KiB never waits for other peers."""


class Pace:
    """One stream's account of processor time. Pure: the caller passes the time and sleeps."""

    def __init__(self, now: float, saved_s: float) -> None:
        self._saved_s = saved_s
        self._filled_at = now

    def charge(self, cost_s: float, now: float, others: int = 0) -> float:
        """Takes a cost out of the account; returns for how many seconds the stream has to wait.

        Args:
            others: how many other streams are overdrawn now, which get their part of SHARE meanwhile.
        """
        owed_s = cost_s - self.spend(cost_s, now)
        wait_s = owed_s / SHARE * (1 + others)
        self._filled_at = now + wait_s  # the account is even then
        return wait_s

    def spend(self, most_s: float, now: float) -> float:
        """Takes up to `most_s` out of what is saved; returns what was taken."""
        saved_s = min(BURST_S, self._saved_s + (now - self._filled_at) * SHARE)
        taken_s = min(most_s, saved_s)
        self._saved_s, self._filled_at = saved_s - taken_s, now
        return taken_s


class Newcomers:
    """What streams may spend as they begin: one account for all of a process.

    A peer that opens one stream after another so gains one small message each, which costs the loop less than
    the call does. Pure: the caller passes the time.
    """

    def __init__(self) -> None:
        self._pace = Pace(0.0, BURST_S)

    def take(self, now: float) -> float:
        """What a stream that begins now may spend, in seconds: at most FIRST_S, at least LEAST_S."""
        return max(LEAST_S, self._pace.spend(FIRST_S, now))


class Overdrawn:
    """Counts the streams of a process that have to wait now."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts one stream while the context lasts."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


NEWCOMERS = Newcomers()
"""The account of new streams of this process."""
OVERDRAWN = Overdrawn()
"""Streams of this process that have sent more than their share."""


class MessageStream:
    """Iterator over the messages that a peer sends on one stream.

    Args:
        messages: of gRPC.
        peer: the peer's address, for the log.
        read: turns what came into what the method takes.
    """

    def __init__(
        self, messages: AsyncIterable[Any], peer: Callable[[], str], read: Callable[[Any], Awaitable[Any]]
    ) -> None:
        self._stream = messages
        self._messages: AsyncIterator[Any] | None = None
        self._peer = peer
        self._read = read
        now = time.monotonic()
        self._pace = Pace(now, NEWCOMERS.take(now))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:  # not before: gRPC warns of an iterator that nobody asks
            self._messages = aiter(self._stream)
        message = await anext(self._messages)
        if isinstance(message, Unparsed):
            message.peer = self._peer()
            cost_s = MESSAGE_S + len(message.data) * BYTE_S
            wait_s = self._pace.charge(cost_s, time.monotonic(), OVERDRAWN.count)
            if wait_s > 0:
                with OVERDRAWN.one_more():
                    await asyncio.sleep(wait_s)
        return await self._read(message)
