"""How long a step takes, by its rows and sessions: a profile taken at load, and what steps took since.

What a busy neighbour does to a step is a factor on all sizes, learnt fast; it changes no comparison between
sizes. These are learnt from pairs of successive steps only, which the neighbour slowed alike. So noise does
not make the choice of sizes swing. Pure: knows rows and milliseconds, nothing of what is computed.
"""

from bisect import bisect_right
from collections.abc import Mapping
from math import log2

PROFILED = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256)
"""Rows that a profile should have: kernels work in tiles, so both sides of likely edges."""

_SCALE_WEIGHT = 0.2
_SIZE_WEIGHT = 0.05
"""Of what a pair of successive steps says about their sizes."""
_SIZES = 24  # powers of two of rows
_REFRESH = 32
"""Comparisons after which sizes are worked out anew; one alone hardly moves them."""
_LEAST_MS = 1e-3
# A step that took so many times as long was held up by something else.
_MOST_RATIO = 2.0


class StepPace:
    """Expected milliseconds of a step.

    Args:
        profile: milliseconds of a step of one session by its rows, as measured; without one all sizes start
            out alike, so that larger ones are tried.
        session_ms: what each further session adds to a step of as many rows.
        depth: cached positions that the profile's rows attended over.
        deeper_ms: what each further position adds for each row.
    """

    __slots__ = (
        "_compared",
        "_corrected",
        "_correction",
        "_deeper_ms",
        "_depth",
        "_last",
        "_ms",
        "_overhead_ms",
        "_rows",
        "_scale",
        "_session_ms",
    )

    def __init__(
        self,
        profile: Mapping[int, float] | None = None,
        session_ms: float = 0.0,
        depth: float = 0.0,
        deeper_ms: float = 0.0,
    ) -> None:
        points = sorted((profile or {}).items())
        self._rows = [rows for rows, _ in points]
        # A larger step that measured faster was measured wrongly.
        self._ms = [max(ms for _, ms in points[: at + 1]) for at in range(len(points))]
        self._session_ms = session_ms
        self._depth = depth
        self._deeper_ms = deeper_ms
        self._scale: float | None = 1.0 if points else None
        self._correction = [1.0] * (_SIZES + 1)
        self._corrected: dict[int, float] = {}  # milliseconds of one session by rows, the scale apart
        self._compared = 0
        self._last: tuple[int, float] | None = None
        self._overhead_ms: float | None = None

    def record(self, rows: int, milliseconds: float, sessions: int = 1, depth: float = 0.0) -> None:
        """Learns from the forward of one step of `rows` input tokens; arguments as for `expected_ms`."""
        extra = self._beside_ms(rows, sessions, depth) * (self._scale or 1.0)
        ratio = max(milliseconds - extra, _LEAST_MS) / self._profile_ms(rows)
        if self._last is not None and self._last[0] != rows:
            self._compare(*self._last, rows, ratio)
        self._last = rows, ratio
        scale = ratio / self._correct(rows)
        known = self._scale or scale
        self._scale = known + _SCALE_WEIGHT * (min(scale, _MOST_RATIO * known) - known)

    def record_overhead(self, milliseconds: float, sessions: int) -> None:
        """Learns from the time between two forwards that was not spent waiting."""
        each = milliseconds / sessions
        known = self._overhead_ms
        self._overhead_ms = each if known is None else known + _SCALE_WEIGHT * (each - known)

    def expected_ms(self, rows: int, sessions: int = 1, depth: float = 0.0) -> float:
        """What a forward of `rows` (at least 1) should take; 0 where none was ever seen.

        `depth` is how many cached positions a row attends over, on average.
        """
        if self._scale is None:
            return 0.0
        alone = self._corrected.get(rows)
        if alone is None:
            alone = self._corrected[rows] = self._profile_ms(rows) * self._correct(rows)
        return (alone + self._beside_ms(rows, sessions, depth)) * self._scale

    def step_ms(self, rows: int, sessions: int = 1, depth: float = 0.0) -> float:
        """The same with what lies between two forwards; above 0 at all times."""
        return (self.expected_ms(rows, sessions, depth) + (self._overhead_ms or 0.0) * sessions) or 1.0

    def _beside_ms(self, rows: int, sessions: int, depth: float) -> float:
        """What the profile, taken with one session and a short past, says nothing of."""
        return self._session_ms * (sessions - 1) + self._deeper_ms * rows * max(0.0, depth - self._depth)

    def _compare(self, rows_before: int, before: float, rows: int, now: float) -> None:
        """Two successive steps took so many times what the profile says: their sizes' corrections part."""
        self._compared += 1
        if self._compared % _REFRESH == 0:
            self._corrected.clear()
        off = (now / self._correct(rows)) / (before / self._correct(rows_before))
        learnt = _SIZE_WEIGHT * (min(max(off, 1 / _MOST_RATIO), _MOST_RATIO) - 1.0)
        for size, change in ((rows, learnt), (rows_before, -learnt)):
            low, share = _place(size)
            self._correction[low] *= 1.0 + change * (1.0 - share)
            self._correction[low + 1] *= 1.0 + change * share

    def _profile_ms(self, rows: int) -> float:
        """Between two points a straight line; beyond the last one, the line through the last two goes on."""
        if len(self._rows) < 2:
            return self._ms[0] if self._ms else 1.0
        at = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        low, high = self._rows[at - 1], self._rows[at]
        slope = (self._ms[at] - self._ms[at - 1]) / (high - low)
        return max(self._ms[at - 1] + slope * (rows - low), self._ms[0])

    def _correct(self, rows: int) -> float:
        low, share = _place(rows)
        return self._correction[low] * (1.0 - share) + self._correction[low + 1] * share


def _place(rows: int) -> tuple[int, float]:
    """Between which powers of two a size lies, and how far towards the upper one."""
    exact = min(log2(rows), _SIZES - 1e-9)
    return int(exact), exact - int(exact)
