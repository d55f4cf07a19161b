"""Delays between attempts at something that keeps failing. Pure: the caller sleeps, and owns the clock."""

import random
from collections.abc import Callable


class Backoff:
    """Delays that grow by a factor from the first to the longest, until an attempt succeeds.

    Args:
        first_s: the first delay in seconds.
        most_s: the longest delay in seconds, jitter included.
        factor: ratio of each delay to the one before.
        jitter: the share of each delay that is random: 0.5 spreads it evenly over half of it to all of it.
        chance: the source of randomness in [0, 1).
    """

    __slots__ = ("_chance", "_factor", "_first_s", "_jitter", "_most_s", "_next_s")

    def __init__(
        self,
        first_s: float,
        most_s: float,
        *,
        factor: float = 2.0,
        jitter: float = 0.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = min(first_s, most_s)
        self._most_s = most_s
        self._factor = factor
        self._jitter = jitter
        self._chance = chance
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt; the delay after this one is longer."""
        delay_s, self._next_s = self._next_s, min(self._next_s * self._factor, self._most_s)
        return delay_s * (1.0 - self._jitter * (1.0 - self._chance())) if self._jitter else delay_s

    def reset(self) -> None:
        """An attempt succeeded: the next delay is the first one again."""
        self._next_s = self._first_s
