"""The stalls of one process's event loop: the recent ones, the longest by place, and which one to log.

Pure: knows no clock, no thread and no loop.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

UNKNOWN = "unknown"
"""Place of a stall that ended before the loop's stack was seen."""
KEPT = 64
"""The most recent stalls that are kept."""
MOST_PLACES = 64
"""Most places with a longest stall of their own; further places count as UNKNOWN."""
LOGGED_S = 0.1
"""Seconds from which a stall is worth a line in the log."""
LOG_EVERY_S = 10.0
"""Seconds between two lines in the log."""


class Seen(NamedTuple):
    """What the loop's thread ran at one moment."""

    where: str = UNKNOWN
    """The innermost function that belongs neither to Python nor to a library, as `module.function`."""
    stack: tuple[str, ...] = ()
    """Functions as `module.function:line`, the innermost first."""
    request: str = ""
    """Id of the request that the running task answers; empty where the task answers none."""


def most_seen(seen: Counter[Seen]) -> Seen:
    """What was seen most often at the place that was seen most often; an empty Seen where nothing was."""
    places: Counter[str] = Counter()
    for each, count in seen.items():
        places[each.where] += count
    return max(seen, key=lambda each: (places[each.where], seen[each]), default=Seen())


@dataclass(frozen=True, slots=True)
class Stall:
    """A time during which the event loop called nothing that was due."""

    ended: float
    """Time at the stall's end, in seconds since 1970."""
    seconds: float
    """Length on the wall; the loop is watched so often that this may be 25 ms too short."""
    processor_seconds: float
    """Processor time of the loop's thread meanwhile. Little of it: the thread waited."""
    seen: Seen

    def as_object(self) -> dict[str, Any]:
        """The stall as /stalls lists it."""
        return {
            "ended": round(self.ended, 3),
            "seconds": round(self.seconds, 4),
            "processor_seconds": round(self.processor_seconds, 4),
            "where": self.seen.where,
            "request": self.seen.request,
            "stack": list(self.seen.stack),
        }


class StallRecord:
    """Keeps the stalls of one event loop."""

    def __init__(self) -> None:
        self._recent: deque[Stall] = deque(maxlen=KEPT)
        self._longest: dict[str, float] = {}
        self._unlogged: list[Stall] = []
        self._logged_at: float | None = None

    @property
    def recent(self) -> Sequence[Stall]:
        """The most recent stalls, the oldest first."""
        return tuple(self._recent)

    def add(self, stall: Stall) -> tuple[str, float]:
        """Keeps a stall; returns its place and the seconds of the longest stall at that place so far."""
        self._recent.append(stall)
        place = stall.seen.where
        if place not in self._longest and len(self._longest) >= MOST_PLACES:
            place = UNKNOWN
        self._longest[place] = max(stall.seconds, self._longest.get(place, 0.0))
        if stall.seconds >= LOGGED_S:
            self._unlogged.append(stall)
        return place, self._longest[place]

    def to_log(self, now: float, last: bool = False) -> tuple[Stall, int] | None:
        """The longest stall that no line tells of, and how many more there were; None while no line is due.

        Args:
            now: seconds of any clock that only moves forward.
            last: whether no further line will come, so that the interval between lines does not count.
        """
        if not self._unlogged:
            return None
        if not last and self._logged_at is not None and now < self._logged_at + LOG_EVERY_S:
            return None
        longest = max(self._unlogged, key=lambda stall: stall.seconds)
        others = len(self._unlogged) - 1
        self._unlogged.clear()
        self._logged_at = now
        return longest, others
