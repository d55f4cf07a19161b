"""Keys and values of the simulated verifiers: of each slot, the hash of all ids up to the one in it.

A row's keys and values stand for everything before it, too: so a row that is kept, moved or shared wrongly
changes every id that is computed from it, as it would with a model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from outrider.lm.kv.blocks import BLOCK, BlockAllocator, slots_of
from outrider.lm.kv.table import SlotTable
from speculative.errors import Overloaded


class ToyPool:
    """Stands in for SlotPool under the real KVCache and its tables.

    Args:
        blocks: number of blocks in all.
    """

    chains_only = False
    """See SlotPool."""

    def __init__(self, blocks: int) -> None:
        self.blocks = BlockAllocator(blocks)
        self.max_blocks = blocks
        self.numerics = "toy"
        self.rows = [0] * blocks * BLOCK
        """Prefix hash by slot."""
        self.evict: Callable[[int], int] = lambda blocks: 0

    @property
    def most_tables(self) -> int:
        """Largest number of sessions that may have tables at once; see SlotPool."""
        return self.max_blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks that nobody holds."""
        return self.blocks.free

    def has_room(self, blocks: int) -> bool:
        """Whether there is room for a copy; see SlotPool."""
        return self.free_blocks - blocks > self.max_blocks // 2

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Blocks for one holder; see SlotPool. Raises Overloaded."""
        if self.free_blocks < count:
            self.evict(count - self.free_blocks)
        taken = self.blocks.take(count, after, room)
        if taken is None:
            raise Overloaded(
                f"{count} more blocks are needed, {self.free_blocks} are free", retry_after_s=1.0
            )
        return taken

    def table(self, room: int = 0) -> SlotTable:
        """A table for a new session; see SlotPool."""
        return SlotTable(cast(Any, self), room)

    def resumable(self, blocks: Sequence[int]) -> Sequence[int]:
        """The part of a cached prefix behind which a session can go on: all of it."""
        return blocks

    def same(self, cached: int, own: int) -> None:
        """Notes nothing of equal blocks; see SlotPool."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows from slots to slots: all are read before any is written."""
        for slot, row in zip(targets, [self.rows[slot] for slot in sources], strict=True):
            self.rows[slot] = row

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the rows of blocks; no proposer of a simulated verifier keeps hidden states beside them."""
        self.copy(slots_of(sources), slots_of(targets))

    def check_integrity(self, held: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError if a block is lost, or held by others than these."""
        self.blocks.check(held)
