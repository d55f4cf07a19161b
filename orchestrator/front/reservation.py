"""Places for a call's requests, taken before the call's message is parsed.

The headers of a call say who calls, but not how many requests the message holds. So a call reserves one place
when its message has arrived, and the other places once the message is parsed and its prompts are counted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from orchestrator.front.auth import Caller
from orchestrator.front.concurrency import ConcurrencyLimit


class Reservation:
    """The places that one call's requests hold: in this orchestrator and in the quota of the key."""

    def __init__(self, limit: ConcurrencyLimit, caller: Caller, stack: ExitStack) -> None:
        self._limit = limit
        self._caller = caller
        self._stack = stack
        self._held = 0

    def widen(self, count: int) -> None:
        """Holds `count` places in all, from now until the reservation ends; never fewer than before.

        Raises Overloaded, QuotaExceeded, Unavailable where the process stops, and InvalidRequest where
        `count` places could never be held at once.
        """
        more = count - self._held
        if more <= 0:
            return
        self._stack.enter_context(self._limit.enter(more, held=self._held))
        self._stack.enter_context(self._caller.within_quota(more, held=self._held))
        self._held = count


@contextmanager
def reserved(limit: ConcurrencyLimit, caller: Caller) -> Iterator[Reservation]:
    """A reservation of one place, which ends with the context. Raises as `Reservation.widen` does."""
    with ExitStack() as stack:
        reservation = Reservation(limit, caller, stack)
        reservation.widen(1)
        yield reservation
