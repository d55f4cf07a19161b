"""Free blocks of slots, and the number of holders of every other block. Pure: knows numbers, no tensors.

A session attends fastest over one run of neighbouring blocks, because that is a view. So a growing session
gets the block behind its last one where that is free, and a new run begins where most blocks around are free.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 16
"""Number of slots in a block."""


class BlockAllocator:
    """Blocks 0 to capacity - 1, each with the number of its holders."""

    def __init__(self, capacity: int) -> None:
        self._holders: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self.free = capacity
        """Number of blocks without a holder."""

    @property
    def capacity(self) -> int:
        """Number of blocks in all."""
        return len(self._holders)

    def grow(self, capacity: int) -> None:
        """Adds free blocks behind the existing ones, up to ``capacity`` blocks in all."""
        self.free += capacity - self.capacity
        self._holders = np.concatenate([self._holders, np.zeros(capacity - self.capacity, np.int32)])

    def holders(self, block: int) -> int:
        """Number of holders of this block."""
        return int(self._holders[block])

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int] | None:
        """Takes `count` free blocks for one holder; returns None, with nothing changed, if too few are free.

        The blocks follow block `after` as far as those are free; the others lie together where a run of
        `room` blocks fits best.
        """
        if count > self.free:
            return None
        taken = self._behind(after, count) if after is not None else []
        self._hold(taken)
        while len(taken) < count:
            start, length = self._longest_run()
            missing = count - len(taken)
            start += max(0, length - max(room, missing)) // 2
            more = list(range(start, start + min(missing, length)))
            self._hold(more)
            taken += more
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one holder to each block; a free block cannot be shared."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free"
            self._holders[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """Removes one holder of each block; a block without holders is free."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is given back twice"
            self._holders[block] -= 1
            self.free += not self._holders[block]

    def is_free_behind(self, after: int | None, count: int) -> bool:
        """Whether the ``count`` blocks behind block ``after`` are free; there are none behind None."""
        if after is None or after + count >= self.capacity:
            return False
        return not self._holders[after + 1 : after + 1 + count].any()

    def longest_run(self) -> int:
        """Length of the longest run of free blocks, in blocks."""
        return self._longest_run()[1] if self.free else 0

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless ``held``, one list of blocks per holder, accounts for every holder."""
        counts = Counter(block for blocks in held for block in blocks)
        expected = np.zeros(self.capacity, dtype=np.int32)
        for block, count in counts.items():
            expected[block] = count
        wrong = np.flatnonzero(expected != self._holders)
        assert not len(wrong), f"blocks {wrong[:8].tolist()} are lost or held by nobody known"
        assert self.free == int((self._holders == 0).sum()), "the number of free blocks is wrong"

    def _hold(self, blocks: Sequence[int]) -> None:
        self._holders[blocks] = 1
        self.free -= len(blocks)

    def _behind(self, after: int, count: int) -> list[int]:
        window = self._holders[after + 1 : after + 1 + count]
        occupied = np.flatnonzero(window)
        length = int(occupied[0]) if len(occupied) else len(window)
        return list(range(after + 1, after + 1 + length))

    def _longest_run(self) -> tuple[int, int]:
        """First block and length of the longest run of free blocks."""
        taken = np.flatnonzero(self._holders)
        edges = np.concatenate([[-1], taken, [self.capacity]])
        gaps = np.diff(edges) - 1
        widest = int(gaps.argmax())
        return int(edges[widest]) + 1, int(gaps[widest])


def slots_of(blocks: Iterable[int]) -> list[int]:
    """The slots of these blocks, in order."""
    return [block * BLOCK + offset for block in blocks for offset in range(BLOCK)]
