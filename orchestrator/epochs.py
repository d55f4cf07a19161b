"""Epochs: which incarnation of a session's placement a message speaks of.

64 bits: the upper 44 are milliseconds, or one above the highest epoch seen where the clock is behind it; the
lower 20 are random, so that two takers do not share one. Pure but for clock and randomness.
"""

from collections.abc import Callable

_RANDOM_BITS = 20


class Epochs:
    """Hands out epochs, each above the last one that it gave or saw."""

    def __init__(self, clock_ms: Callable[[], int], random_bits: Callable[[int], int]) -> None:
        self._clock_ms = clock_ms
        self._random_bits = random_bits
        self._highest = 0

    def saw(self, epoch: int) -> None:
        """Somebody uses this one; the next is above it."""
        self._highest = max(self._highest, epoch)

    def next(self) -> int:
        """A new epoch."""
        upper = max((self._highest >> _RANDOM_BITS) + 1, self._clock_ms())
        self._highest = upper << _RANDOM_BITS | self._random_bits(_RANDOM_BITS)
        return self._highest
