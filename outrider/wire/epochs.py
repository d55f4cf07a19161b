"""Epochs as all processes read them: 64 bits, the upper 44 milliseconds since 1970, the lower 20 random.

An epoch from the far future is refused: it would fence off every process for good, as none could make a
higher epoch.
"""

import time

from outrider.wire.codec import epoch_to_text
from speculative.errors import InvalidRequest

RANDOM_BITS = 20
DAY_MS = 86_400_000
MOST_AHEAD_MS = DAY_MS
"""Milliseconds by which the clock of the process that made an epoch may be ahead."""


def wall_clock_ms() -> int:
    """Milliseconds since 1970, as epochs count them."""
    return time.time_ns() // 1_000_000


def checked_epoch(epoch: int, now_ms: int) -> int:
    """The epoch. Raises InvalidRequest where it is more than a day ahead of this clock."""
    ahead_ms = (epoch >> RANDOM_BITS) - now_ms
    if ahead_ms > MOST_AHEAD_MS:
        raise InvalidRequest(
            f"epoch {epoch_to_text(epoch)} is {ahead_ms / DAY_MS:.2f} days ahead of this process's clock; "
            f"{MOST_AHEAD_MS / DAY_MS:g} is the most: set the clocks right"
        )
    return epoch
