"""The messages of one stream, at a pace that leaves the event loop to others.

A peer may send messages as fast as the connection takes them. Each stream has an account of processor time,
which fills with the clock; a stream that has overdrawn its account is read again once the account is even.
Meanwhile gRPC's flow control makes the peer wait. Streams that are overdrawn at once share what one may take,
however many a peer has opened. Beyond a bare share of its own, each stream draws on one account of all
streams, so that many streams below their shares do not take the loop together. The bare share shrinks where
many streams send at once. A method's streams may have a common account of their own (`draw_on`).
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from outrider.wire.incoming.hand_over import MessageSender, hand_over
from outrider.wire.incoming.unparsed import Unparsed

SHARE = 0.1
"""Largest lasting share of the event loop's time for reading the messages of all streams that send too many.
Answers may take as long again, and in a verifier the engine's thread waits for the interpreter then."""
BURST_S = 0.1
"""The most processor time that a stream saves up, in seconds."""
FIRST_S = 0.01
"""The most processor time that a stream may spend as it begins, in seconds."""
ALL_SHARE = 0.2
"""Largest lasting share of the event loop's time for reading the messages of all streams together, beside
what BARE_SHARE leaves to each."""
ALL_BURST_S = 0.03
"""The most processor time that all streams save up together, and new streams as much again, in seconds."""
BARE_SHARE = 0.005
"""The largest share that every stream has to itself, whatever others spend: some 50 messages a second."""
ALL_BARE_SHARE = 0.05
"""The sum of these shares by account: where more than 10 streams send at once, each has its part."""
RECENT_S = 1.0
"""How long a stream counts as one that sends, in seconds, up to twice as long."""
BARE_BURST_S = 0.002
"""The most that every stream saves up for itself, in seconds."""
MESSAGE_S = 100e-6
"""What reading one message is taken to cost, in seconds of processor time."""
BYTE_S = 3e-9
"""What each byte of a message is taken to cost beside that."""
LEAST_S = 2 * MESSAGE_S
"""What every stream may spend as it begins: one message of up to 32 KiB never waits for other peers."""


class Savings:
    """Processor time that fills with the clock, up to a most. Pure: the caller passes the time."""

    def __init__(self, share: float, most_s: float, saved_s: float, now: float = 0.0) -> None:
        self.share = share
        """The part of the time that is saved."""
        self._most_s = most_s
        self._saved_s = saved_s
        self._filled_at = now

    def spend(self, most_s: float, now: float) -> float:
        """Takes up to `most_s` out of what is saved; returns what was taken."""
        passed_s = max(0.0, now - self._filled_at)
        saved_s = min(self._most_s, self._saved_s + passed_s * self.share)
        taken_s = min(most_s, saved_s)
        self._saved_s, self._filled_at = saved_s - taken_s, max(now, self._filled_at)
        return taken_s

    def even_at(self, moment: float) -> None:
        """Nothing fills before this time, which lies ahead."""
        self._filled_at = moment


class CommonSavings(Savings):
    """What many streams may spend together: many that stay below SHARE would take the loop.

    Args:
        share: their lasting share of the event loop's time.
    """

    def __init__(self, share: float = ALL_SHARE) -> None:
        super().__init__(share, ALL_BURST_S, ALL_BURST_S)
        self._recent: set[int] = set()
        self._earlier = 0
        self._since = 0.0

    def bare_share(self, stream: object, now: float) -> float:
        """The share that this stream, which sends now, and each other one that sends has to itself."""
        if now - self._since >= RECENT_S:
            self._earlier = len(self._recent) if now - self._since < 2 * RECENT_S else 0
            self._recent, self._since = set(), now
        self._recent.add(id(stream))
        return min(BARE_SHARE, ALL_BARE_SHARE / max(self._earlier, len(self._recent)))


class Pace:
    """One stream's account of processor time. Pure: the caller passes the time and sleeps.

    Args:
        common: the account of all streams, which this stream draws on beyond its bare share.
    """

    def __init__(self, now: float, saved_s: float, common: CommonSavings | None = None) -> None:
        self._own = Savings(SHARE, BURST_S, saved_s, now)
        self._bare = Savings(BARE_SHARE, BARE_BURST_S, min(saved_s, BARE_BURST_S), now)
        self.common = common

    def charge(self, cost_s: float, now: float, others: int = 0) -> float:
        """Takes a cost out of the account; returns for how many seconds the stream has to wait.

        Args:
            others: how many other streams are overdrawn now, which get their part of SHARE meanwhile.
        """
        paid_s = self._own.spend(cost_s, now)
        if self.common is not None:
            self._bare.share = self.common.bare_share(self, now)
            bare_s = self._bare.spend(paid_s, now)
            paid_s = bare_s + self.common.spend(paid_s - bare_s, now)
        wait_s = (cost_s - paid_s) / SHARE * (1 + others)
        if wait_s > 0:
            self._own.even_at(now + wait_s)
        return wait_s


class Newcomers:
    """What streams may spend as they begin: one account for all of a process.

    A peer that opens one stream after another so gains one small message each, which costs the loop less than
    the call does. Pure: the caller passes the time.
    """

    def __init__(self) -> None:
        self._savings = Savings(SHARE, ALL_BURST_S, ALL_BURST_S)

    def take(self, now: float) -> float:
        """What a stream that begins now may spend, in seconds: at most FIRST_S, at least LEAST_S."""
        return max(LEAST_S, self._savings.spend(FIRST_S, now))


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
COMMON = CommonSavings()
"""The account of all streams of this process that have no other."""
OVERDRAWN = Overdrawn()
"""Streams of this process that have sent more than their share."""


class MessageStream:
    """Iterator over the messages that a peer sends on one stream.

    Args:
        messages: of gRPC.
        peer: the peer's address, for the log.
        read: turns what came into what the method takes.
        sender: the sender, if gRPC's server hands the messages over: they then wait for their turns among the
            messages of all senders. None: each message is handed over as it comes.
    """

    def __init__(
        self,
        messages: AsyncIterable[Any],
        peer: Callable[[], str],
        read: Callable[[Any], Awaitable[Any]],
        sender: MessageSender | None = None,
    ) -> None:
        self._stream = messages
        self._sender = sender
        self._messages: AsyncIterator[Any] | None = None
        self._peer = peer
        self._read = read
        now = time.monotonic()
        self._pace = Pace(now, NEWCOMERS.take(now), COMMON)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:  # not before: gRPC warns of an iterator that nobody asks
            self._messages = aiter(self._stream)
        message = await self._next(self._messages)
        if isinstance(message, Unparsed):
            message.peer = self._peer()
            cost_s = MESSAGE_S + len(message.data) * BYTE_S
            wait_s = self._pace.charge(cost_s, time.monotonic(), OVERDRAWN.count)
            if wait_s > 0:
                with OVERDRAWN.one_more():
                    await asyncio.sleep(wait_s)
        return await self._read(message)

    def draw_on(self, common: CommonSavings) -> None:
        """Draws on this account from now on, instead of that of all streams of the process."""
        self._pace.common = common

    def _next(self, messages: AsyncIterator[Any]) -> Awaitable[Any]:
        if self._sender is None:
            return anext(messages)
        return hand_over().take(anext(messages), self._sender)
