"""Decides which of the arrived messages gRPC hands over next.

gRPC copies an arrived message into Python in one piece, when the task that asked for the message wakes up: 1
to 2 ms of the event loop for each MiB. Tasks wake up one after the other, so many large messages that arrive
together would hold the loop until all are copied. Here a task that wakes up waits for its turn before the
copy is made, and the loop has a pause after every large message. The sender of the fewest bytes of late comes
first, so a small message waits for one copy and one pause, however many large messages others have sent.

The size of a message is known only when it has been copied.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Generator
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import grpc.aio

from outrider.wire.incoming.shape import SMALL_BYTES
from outrider.wire.incoming.unparsed import Unparsed
from speculative.errors import InvalidRequest

T = TypeVar("T")

BYTE_S = 1.5e-9
"""The assumed cost of copying a byte, in seconds of the loop's time."""
PAUSE = 2.0
"""Length of the pause after a large message, as a multiple of the time to copy the message."""
SHARE = 0.1
"""The share of the loop's time that pays off a sender's debt."""
MOST_WAITING = 16
"""While more messages than this wait, there are no pauses: their memory has to be freed, and messages of
other senders may wait behind them."""
MOST_COMPARED = 256
"""The most senders that are compared for the next turn; those whose last turn is longest ago are taken."""
MOST_DEBTORS = 1024
"""Number of senders on record beyond which senders without a debt are forgotten."""


class MessageSender(NamedTuple):
    """The sender of a message, as far as known before the message is read.

    A large message is held against all three fields: a caller that invents new credentials, or dials anew for
    each call, is still known by the other fields.
    """

    host: str
    """The sender's address without its port."""
    connection: str
    """The sender's address with its port."""
    credentials: int
    """Hash of the header of authorization, unchecked."""


class Debts:
    """The loop's time that each sender has used of late. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._even_at: dict[str | int, float] = {}

    def add(self, sender: MessageSender, cost_s: float, now: float) -> None:
        """Counts a message whose copy took `cost_s`."""
        if len(self._even_at) > MOST_DEBTORS:
            self._even_at = {who: at for who, at in self._even_at.items() if at > now}
        for who in sender:
            self._even_at[who] = max(now, self._even_at.get(who, now)) + cost_s / SHARE

    def of(self, sender: MessageSender, now: float) -> float:
        """Seconds until the sender's debts are paid off, summed over its three fields; 0: it has no debt."""
        return sum(max(0.0, self._even_at.get(who, now) - now) for who in sender)


class Arriving(Generic[T]):
    """A message that gRPC was asked for. To await this object is to wait for the arrival, without a copy."""

    def __init__(self, message: Awaitable[T]) -> None:
        self._steps: Generator[Any, Any, T] = message.__await__()
        self.here: list[T] = []
        """The message, if it was there without waiting."""

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            arrival = next(self._steps)
        except StopIteration as done:
            self.here = [done.value]
            return
        try:
            yield arrival
        except BaseException as error:
            if isinstance(arrival, asyncio.Future) and arrival.done() and not arrival.cancelled():
                self.drop()  # the message arrived as its call ended: only a copy frees its memory
            else:
                self._steps.throw(error)
            raise

    def copied(self) -> "_Rest[T]":
        """An object to await, which makes the copy and raises what gRPC raises."""
        return _Rest(self._steps)

    def drop(self) -> T | None:
        """Makes the copy only to free gRPC's memory; returns the message, or None if there is none."""
        try:
            next(self._steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # the value of an untyped exception
        except Exception:  # the stream has ended, and nobody wants to know
            return None
        self._steps.close()
        return None


class _Rest(Generic[T]):
    """The last step of a message that has arrived: its copy."""

    def __init__(self, steps: Generator[Any, Any, T]) -> None:
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, T]:
        return (yield from self._steps)


class _Waiting(NamedTuple):
    """A message that has arrived and waits for its turn."""

    arriving: Arriving[Any]
    turn: "asyncio.Future[None]"


class HandOver:
    """The order in which arrived messages are copied on one event loop."""

    def __init__(self) -> None:
        self._debts = Debts()
        self._waiting: dict[MessageSender, deque[_Waiting]] = {}
        self._count = 0
        self._free_at = 0.0
        self._taken = False

    async def take(self, message: Awaitable[T], sender: MessageSender) -> T:
        """The message, once it has arrived and has its turn. Raises what awaiting it raises.

        Raises InvalidRequest where gRPC has lost the message, or refused it as larger than max_message_mb.

        Args:
            message: what a stream of gRPC's server returns for the next message.
        """
        try:
            return await self._take(message, sender)
        except grpc.aio.InternalError as error:
            raise InvalidRequest(
                "the message did not arrive: it is larger than max_message_mb allows, or its call has ended"
            ) from error

    async def _take(self, message: Awaitable[T], sender: MessageSender) -> T:
        arriving = Arriving(message)
        await arriving
        if arriving.here:
            return arriving.here[0]
        if self._count or self._taken or time.monotonic() < self._free_at:
            await self._turn(arriving, sender)
        self._taken = True
        taken: T | None = None
        try:
            taken = await arriving.copied()
        finally:
            self._copied(taken, sender)
        return taken

    async def _turn(self, arriving: Arriving[Any], sender: MessageSender) -> None:
        waiting = _Waiting(arriving, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(sender, deque()).append(waiting)
        self._count += 1
        if self._count == 1 and not self._taken:
            self._call_next()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():  # cancelled as its turn came
                self._copied(arriving.drop(), sender)
            raise

    def _call_next(self) -> None:
        """Gives the next message its turn when the loop's pause is over."""
        loop = asyncio.get_running_loop()
        wait_s = 0.0 if self._count > MOST_WAITING else self._free_at - time.monotonic()
        if wait_s > 0:
            loop.call_later(wait_s, self._next)
        else:
            loop.call_soon(self._next)

    def _next(self) -> None:
        sender = self._first(time.monotonic())
        of_sender = self._waiting.pop(sender)
        waiting = of_sender.popleft()
        if of_sender:
            self._waiting[sender] = of_sender  # behind the others
        self._count -= 1
        self._taken = True
        if waiting.turn.cancelled():
            self._copied(waiting.arriving.drop(), sender)
        else:
            waiting.turn.set_result(None)

    def _first(self, now: float) -> MessageSender:
        """The sender whose turn comes next: the least debt decides, then the longest wait."""
        least, found = float("inf"), None
        for sender in islice(self._waiting, MOST_COMPARED):
            debt = self._debts.of(sender, now)
            if debt < least:
                least, found = debt, sender
            if not debt:
                break
        assert found is not None
        return found

    def _copied(self, message: object, sender: MessageSender) -> None:
        """Counts a copy that was made; the next message has its turn after the pause."""
        self._taken = False
        size = len(message.data) if isinstance(message, Unparsed) else 0
        if size > SMALL_BYTES:
            cost_s, now = size * BYTE_S, time.monotonic()
            self._debts.add(sender, cost_s, now)
            self._free_at = now + PAUSE * cost_s
        if self._count:
            self._call_next()


_OF_LOOPS: "WeakKeyDictionary[asyncio.AbstractEventLoop, HandOver]" = WeakKeyDictionary()


def hand_over() -> HandOver:
    """The HandOver of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _OF_LOOPS.get(loop)
    if found is None:
        found = _OF_LOOPS[loop] = HandOver()
    return found
