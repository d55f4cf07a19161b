"""How long a request that lost its verifier waits for another, and how often it asks.

Pure: knows nothing of verifiers; the clock is given.
"""

from collections.abc import Callable

FIRST_S = 0.02
LONGEST_S = 0.5


class Clock:
    """The time that a request has.

    Args:
        now: seconds of any monotonic clock.
        seconds: until its deadline; None: it has none.
        patience_s: how long a request without a deadline waits for a verifier.
    """

    def __init__(self, now: Callable[[], float], seconds: float | None, patience_s: float) -> None:
        self._now = now
        self._ends = None if seconds is None else now() + seconds
        self._patience_s = patience_s

    def time_left(self) -> float | None:
        """Seconds until the deadline, not below 0; None: there is none."""
        return None if self._ends is None else max(0.0, self._ends - self._now())

    def gives_up(self) -> float:
        """When a request that loses its verifier now has waited long enough."""
        return self._now() + self._patience_s if self._ends is None else self._ends

    def until(self, moment: float) -> float:
        """Seconds until then."""
        return moment - self._now()


class Pauses:
    """The pauses of one recovery, from its beginning: each twice as long, up to LONGEST_S."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until = clock.gives_up()
        self._next_s = FIRST_S

    def next_s(self) -> float | None:
        """How long to wait before the next attempt; None: the time is over."""
        left_s = self._clock.until(self._until)
        if left_s <= 0:
            return None
        pause_s, self._next_s = min(self._next_s, left_s), min(2 * self._next_s, LONGEST_S)
        return pause_s
