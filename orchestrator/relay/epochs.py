"""Epochs: each names one incarnation of a session's placement.

An epoch has 64 bits. The upper 44 are milliseconds, or one more than those of the epoch to pass where the
clock is behind it; the lower 20 are random, so that two takers never share an epoch. Pure but for clock and
randomness.
"""

import logging
from collections.abc import Callable

from outrider.wire.epochs import DAY_MS, MOST_AHEAD_MS, RANDOM_BITS, checked_epoch

log = logging.getLogger(__name__)


class Epochs:
    """Draws the epochs of this process: each is above all earlier ones."""

    def __init__(self, clock_ms: Callable[[], int], random_bits: Callable[[int], int]) -> None:
        self._clock_ms = clock_ms
        self._random_bits = random_bits
        self._last_ms = 0

    def next(self) -> int:
        """A new epoch, above all earlier ones of this process.

        Where the clock was set back by half a day or more, epochs begin again at the clock: no verifier would
        take one so far ahead. A session that has a higher epoch says so when it is opened.
        """
        now_ms = self._clock_ms()
        if self._last_ms - now_ms > MOST_AHEAD_MS // 2:
            log.warning(
                "the clock was set back by %.1f days: epochs begin again", (self._last_ms - now_ms) / DAY_MS
            )
            self._last_ms = now_ms
        self._last_ms = max(self._last_ms + 1, now_ms)
        return self._made(self._last_ms)

    def above(self, highest: int) -> int:
        """An epoch above one that another process gave to a session.

        Epochs of other sessions do not move, since `highest` may be a stranger's number. Raises
        InvalidRequest where it is so far ahead of this clock that no verifier would take an epoch above it.
        """
        now_ms = self._clock_ms()
        return checked_epoch(self._made(max((highest >> RANDOM_BITS) + 1, now_ms)), now_ms)

    def passes(self, highest: int) -> bool:
        """Whether `above` has an epoch above this one: False if this epoch is too far ahead of the clock."""
        return (highest >> RANDOM_BITS) + 1 - self._clock_ms() <= MOST_AHEAD_MS

    def _made(self, upper: int) -> int:
        return upper << RANDOM_BITS | self._random_bits(RANDOM_BITS)
