"""Where an engine step's time goes: histograms since the start, and the last few thousand values exactly.

Pure: knows numbers, nothing of metrics or threads. One thread writes; any may read.
"""

from bisect import bisect_left

_CAPACITY = 4096
BUCKETS_MS = (
    *(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
    *(12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0),
)
"""Upper bounds of the histogram's buckets, in ms."""


class Samples:
    """A series of milliseconds."""

    __slots__ = ("_capacity", "_last", "_next", "bounds", "buckets", "total_ms")

    def __init__(self, capacity: int = _CAPACITY, bounds: tuple[float, ...] = BUCKETS_MS) -> None:
        self.bounds = bounds
        """Upper bounds of the buckets, in ms."""
        self.buckets = [0] * (len(bounds) + 1)
        """How many values fell into each bucket; the last one is open."""
        self.total_ms = 0.0
        self._capacity = capacity
        self._last: list[float] = []
        self._next = 0

    def add(self, value: float) -> None:
        """One more value; of the last `capacity`, the oldest goes."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total_ms += value
        if len(self._last) < self._capacity:
            self._last.append(value)
        else:
            self._last[self._next] = value
            self._next = (self._next + 1) % self._capacity

    def quantile(self, share: float) -> float:
        """What `share` of the last values do not exceed (nearest rank). Raises ValueError without any."""
        values = sorted(self._last.copy())
        if not values:
            raise ValueError("no value has been added yet")
        return values[min(len(values) - 1, int(share * len(values)))]

    def __len__(self) -> int:
        return len(self._last)


class Timings:
    """Of steps: the target's forward, choosing tokens, waiting for drafts, and the split.

    The split of a step is the wall time between the previous step's forward and its own, less choosing and
    waiting; it is kept by the number of sessions in the step.
    """

    __slots__ = ("forward", "sampling", "split", "waiting")

    def __init__(self) -> None:
        self.forward = Samples()
        self.sampling = Samples()
        self.waiting = Samples()
        self.split: dict[int, Samples] = {}

    def add_split(self, sessions: int, milliseconds: float) -> None:
        """One split of a step with so many sessions."""
        if sessions not in self.split:
            # Copied, so that a reader's loop over it never sees it grow.
            self.split = self.split | {sessions: Samples()}
        self.split[sessions].add(milliseconds)
