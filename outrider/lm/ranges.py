"""Contiguous ranges of slots: who may write where, and nothing about what is written.

First fit over a sorted list of gaps. One session keeps one range, so that its keys and values are a view of
the pool and need no gather; a session that outgrows its range gets a longer one.
"""

from bisect import bisect_left


class RangeAllocator:
    """Hands out disjoint ranges ``[start, start + size)`` of ``[0, capacity)``."""

    def __init__(self, capacity: int, used: int = 0) -> None:
        """``used`` slots at the front are taken already (a pool that was just laid out anew)."""
        self.capacity = capacity
        self._gaps: list[tuple[int, int]] = [(used, capacity - used)] if used < capacity else []

    @property
    def free(self) -> int:
        """Free slots in all gaps together."""
        return sum(size for _, size in self._gaps)

    def take(self, size: int) -> int | None:
        """Start of a new range, or None if no gap is long enough."""
        for at, (start, gap) in enumerate(self._gaps):
            if gap >= size:
                self._shrink(at, size)
                return start
        return None

    def extend(self, end: int, extra: int) -> bool:
        """Lengthens the range that ends at ``end`` in place; False if what follows it is taken."""
        at = bisect_left(self._gaps, (end, 0))
        if at == len(self._gaps) or self._gaps[at][0] != end or self._gaps[at][1] < extra:
            return False
        self._shrink(at, extra)
        return True

    def give(self, start: int, size: int) -> None:
        """Takes a range back, joining it to the gaps beside it."""
        at = bisect_left(self._gaps, (start, 0))
        end = start + size
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == start:
            start = self._gaps.pop(at - 1)[0]
            at -= 1
        self._gaps.insert(at, (start, end - start))

    def check(self, taken: list[tuple[int, int]]) -> None:
        """Raises AssertionError unless ``taken`` ranges and the gaps tile ``[0, capacity)`` without
        overlap."""
        at = 0
        for start, size in sorted([*taken, *self._gaps]):
            assert start == at, f"slot {min(start, at)} is {'taken twice' if start < at else 'lost'}"
            assert size > 0, f"an empty range at slot {start}"
            at += size
        assert at == self.capacity, f"ranges end at {at}, capacity is {self.capacity}"

    def _shrink(self, at: int, size: int) -> None:
        start, gap = self._gaps[at]
        if gap == size:
            del self._gaps[at]
        else:
            self._gaps[at] = (start + size, gap - size)
