"""Epochs: which incarnation of a session's placement a message speaks of.

64 bits: the upper 44 are milliseconds, or one above the epoch that is to be passed where the clock is behind
it; the lower 20 are random, so that two takers do not share one. Pure but for clock and randomness.
"""

import logging
from collections.abc import Callable

from outrider.wire.epochs import DAY_MS, MOST_AHEAD_MS, RANDOM_BITS, checked_epoch

log = logging.getLogger(__name__)


class Epochs:
    """Hands out epochs."""

    def __init__(self, clock_ms: Callable[[], int], random_bits: Callable[[int], int]) -> None:
        self._clock_ms = clock_ms
        self._random_bits = random_bits
        self._last_ms = 0

    def next(self) -> int:
        """A new epoch, above all that this gave before, unless the clock was set back by half a day or more.

        Then it begins again at the clock, as no verifier would take one so far ahead; a session that has a
        higher one says so when it is opened.
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
        """One above an epoch that somebody else gave to a session.

        What other sessions get does not move: that number is a stranger's. Raises InvalidRequest where it is
        so far ahead of this clock that no verifier would take one above it.
        """
        now_ms = self._clock_ms()
        return checked_epoch(self._made(max((highest >> RANDOM_BITS) + 1, now_ms)), now_ms)

    def passes(self, highest: int) -> bool:
        """Whether `above` has one for this: not where it is too far ahead of this clock."""
        return (highest >> RANDOM_BITS) + 1 - self._clock_ms() <= MOST_AHEAD_MS

    def _made(self, upper: int) -> int:
        return upper << RANDOM_BITS | self._random_bits(RANDOM_BITS)
