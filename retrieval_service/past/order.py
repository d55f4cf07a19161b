"""Positions of a growing text, sorted by the ids that end at each, read backwards.

All occurrences of a suffix are then neighbours, and the longest suffix that occurs at all lies next to where
the whole one would be put. A sorted array in blocks: 4 bytes a position, and about two more for the blocks.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 256
"""Positions at which a block is split in two."""

ABOVE = 0xFFFFFFFF
"""Greater than whatever follows a shared beginning in a key: ids are below 2**31, positions below this."""


@dataclass(frozen=True, slots=True)
class PositionRange:
    """A range of the order, `end` exclusive; each end is a block's number and an index in the block."""

    start: tuple[int, int]
    end: tuple[int, int]


class ContextOrder:
    """Positions sorted by `key(position)`; keys differ, and stay the same while a position is held.

    A key is the ids that end at the position, latest first, cut at some length, then the position itself.
    Positions are at least 2**31, so that a text's beginning sorts after every id.
    """

    def __init__(self, key: "Callable[[int], array[int]]") -> None:
        self._key = key
        self._blocks: list[array[int]] = []
        # The key of each block's first position: they are compared without a call into Python.
        self._firsts: list[array[int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def load(self, positions: "array[int]") -> None:
        """Replace all positions by these sorted ones."""
        half = BLOCK // 2
        self._blocks = [positions[at : at + half] for at in range(0, len(positions), half)]
        self._firsts = [self._key(block[0]) for block in self._blocks]

    @property
    def blocks(self) -> "list[array[int]]":
        """The positions in their blocks; not to be changed."""
        return self._blocks

    def positions(self) -> "array[int]":
        """All positions in the order of their contexts."""
        whole: array[int] = array("I")
        for block in self._blocks:
            whole += block
        return whole

    def add(self, position: int) -> None:
        """Insert a position: O(log n), a few microseconds."""
        key = self._key(position)
        at = bisect_right(self._firsts, key) - 1
        if at < 0:
            if not self._blocks:
                self._blocks.append(array("I"))
                self._firsts.append(key)
            at = 0
            self._firsts[0] = key
            self._blocks[0].insert(0, position)
        else:
            block = self._blocks[at]
            block.insert(bisect_left(block, key, 1, key=self._key), position)
        if len(self._blocks[at]) > BLOCK:
            self._split(at)

    def remove(self, position: int) -> None:
        """Remove a position. Raises KeyError where it is not held."""
        key = self._key(position)
        at = bisect_right(self._firsts, key) - 1
        block = self._blocks[at] if at >= 0 else array("I")
        index = bisect_left(block, key, key=self._key)
        if index == len(block) or block[index] != position:
            raise KeyError(position)
        del block[index]
        if not block:
            del self._blocks[at], self._firsts[at]
            return
        if index == 0:
            self._firsts[at] = self._key(block[0])
        if len(block) < BLOCK // 4:
            self._join(at)

    def find(self, ids: "array[int]") -> tuple[int, PositionRange]:
        """Length of the longest prefix of `ids` (latest first) that keys begin with, and their range."""
        place = self._place(ids)
        length = max(
            (_shared(self._key(position), ids) for position in self._beside(place)),
            default=0,
        )
        if not length:
            return 0, PositionRange(place, place)
        found = ids[:length]
        start = self._place(found)
        found.append(ABOVE)
        return length, PositionRange(start, self._place(found))

    def sample(self, span: PositionRange, most: int) -> "array[int]":
        """At most `most` positions of a range, evenly spread."""
        (first, start), (last, end) = span.start, span.end
        if last - first > most:
            # Too many blocks to look at: the middle of one in every few.
            step = (last - first - 1) / most
            picked = (self._blocks[first + 1 + int(step * at)] for at in range(most))
            return array("I", (block[len(block) // 2] for block in picked))
        if first == last:
            found = self._blocks[first][start:end] if start < end else array("I")
        else:
            found = self._blocks[first][start:]
            for block in self._blocks[first + 1 : last]:
                found += block
            if last < len(self._blocks):
                found += self._blocks[last][:end]
        if len(found) <= most:
            return found
        return array("I", (found[at * len(found) // most] for at in range(most)))

    def _place(self, key: "array[int]") -> tuple[int, int]:
        """The place where a key would be inserted: before all keys that are not below it."""
        at = bisect_left(self._firsts, key) - 1
        if at < 0:
            return 0, 0
        return at, bisect_left(self._blocks[at], key, key=self._key)

    def _beside(self, place: tuple[int, int]) -> "array[int]":
        at, index = place
        beside: array[int] = array("I")
        if at < len(self._blocks):
            beside += self._blocks[at][max(index - 1, 0) : index + 1]
            if index == len(self._blocks[at]) and at + 1 < len(self._blocks):
                beside.append(self._blocks[at + 1][0])
        return beside

    def _split(self, at: int) -> None:
        block, half = self._blocks[at], BLOCK // 2
        # Copies, since what an array has set aside to grow is not given back.
        self._blocks[at : at + 1] = [block[:half], block[half:]]
        self._firsts.insert(at + 1, self._key(block[half]))

    def _join(self, at: int) -> None:
        """Merge a block that shrank into a neighbour with room, so that removal leaves no crumbs."""
        for left in (at - 1, at):
            if 0 <= left < len(self._blocks) - 1:
                both = self._blocks[left] + self._blocks[left + 1]
                if len(both) <= BLOCK // 2:
                    self._blocks[left : left + 2] = [both]
                    del self._firsts[left + 1]
                    return


def _shared(key: "array[int]", ids: "array[int]") -> int:
    length = 0
    for ours, theirs in zip(key, ids, strict=False):
        if ours != theirs:
            break
        length += 1
    return length
