"""One session's slot table: its committed positions, and the drafted rows (nodes) beyond them.

The blocks of a table in order make its slots: slot ``i`` holds committed position ``i`` while ``i < length``;
node ``j`` lies at slot ``length + j``. Only full blocks of committed positions may have other holders; a pass
writes to blocks that this table alone holds.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.lm.kv.blocks import BLOCK

if TYPE_CHECKING:
    from outrider.lm.kv.pool import Run, SlotPool


class SlotTable:
    """Cached positions and kept drafted rows of one session."""

    __slots__ = ("_pool", "_room", "_runs", "block_words", "blocks", "depths", "length", "parents")

    def __init__(self, pool: "SlotPool", room: int = 0) -> None:
        """Starts without blocks. ``room`` is the number of slots that the session may come to need in all."""
        self._pool = pool
        self._room = blocks_for(room)
        self._runs: list[Run] = []
        self.blocks: list[int] = []
        """Block indices of the table, in order of position."""
        self.block_words = array("i")
        """The same indices as int32 words, which a step copies to its device as they are."""
        self.length = 0
        """Number of committed positions whose keys and values the table holds."""
        self.parents: list[int] = []
        """Parent node of each kept node, -1 for the last committed position."""
        self.depths: list[int] = []
        """Depth of each kept node; a child of the last committed position has depth 0."""

    @classmethod
    def at(cls, pool: "SlotPool", runs: "Sequence[Run]", length: int, parents: Sequence[int]) -> "SlotTable":
        """A table over runs of whole blocks that another process (the leading rank) accounts for.

        Such a table never grows and is never closed; ``parents`` are the parents of its kept nodes.
        """
        table = cls(pool)
        for low, high in runs:
            table._add(range(low // BLOCK, high // BLOCK))
        table.length = length
        for parent in parents:
            table.parents.append(parent)
            table.depths.append(table.depths[parent] + 1 if parent >= 0 else 0)
        return table

    @property
    def all_runs(self) -> "Sequence[Run]":
        """The runs of slots in the pool that the table's blocks make, in order."""
        return self._runs

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begins an empty table with full blocks of committed positions, shared with their other holders."""
        assert not self.blocks, "only an empty table can begin with others' blocks"
        self._pool.blocks.share(blocks)
        self._add(blocks)
        self.length = len(blocks) * BLOCK

    def copy_of(self, blocks: Sequence[int]) -> None:
        """Begins an empty table with a copy of full committed blocks, so that its slots lie in one run.

        Raises Overloaded, with nothing changed, where the pool has no room for the copy.
        """
        assert not self.blocks, "only an empty table can begin with others' blocks"
        self.reserve(len(blocks) * BLOCK)
        self.length = len(blocks) * BLOCK
        self._pool.copy_blocks(blocks, self.blocks[: len(blocks)])

    def lacks(self, need: int) -> int:
        """Number of blocks that the table lacks for ``need`` slots."""
        return max(0, blocks_for(need) - len(self.blocks))

    def reserve(self, need: int) -> None:
        """Extends the table to at least ``need`` slots. Raises Overloaded, with nothing changed."""
        if missing := self.lacks(need):
            after = self.blocks[-1] if self.blocks else None
            self._add(self._pool.take(missing, after, max(0, self._room - len(self.blocks))))

    def runs(self, low: int, high: int) -> "list[Run]":
        """The runs of slots in the pool that hold the table's slots ``[low, high)``, in order."""
        found = []
        begin = 0
        for start, end in self._runs:
            size = end - start
            if begin < high and begin + size > low:
                found.append((start + max(0, low - begin), start + min(size, high - begin)))
            begin += size
        return found

    def slots(self, low: int, high: int) -> list[int]:
        """The slots in the pool that hold the table's slots ``[low, high)``, in order."""
        return [slot for start, end in self.runs(low, high) for slot in range(start, end)]

    @property
    def nodes(self) -> int:
        """Number of kept drafted rows."""
        return len(self.parents)

    def commit(self, path: Sequence[int]) -> list[int]:
        """Makes the nodes of ``path`` committed positions.

        ``path`` is a chain of nodes from a child of the last committed position down. Nodes below the last
        node of the path are kept and renumbered in order; all others are freed. An empty path changes
        nothing.

        Returns the new index of every old node, -1 for nodes that were committed or freed. Raises ValueError
        if ``path`` is not such a chain.
        """
        if not path:
            return list(range(self.nodes))
        self._check_chain(path)
        kept = self._below(path[-1])
        renumbered = [-1] * self.nodes
        for new, old in enumerate(kept):
            renumbered[old] = new
        self._compact([*path, *kept])
        last, shift = path[-1], len(path)
        parents = [-1 if self.parents[old] == last else renumbered[self.parents[old]] for old in kept]
        self.depths = [self.depths[old] - shift for old in kept]
        self.parents = parents
        self.length += shift
        return renumbered

    def keep(self, path: Sequence[int]) -> None:
        """Makes the nodes of ``path``, a chain as in `commit`, committed positions and frees all others."""
        self._check_chain(path)
        self._compact(path)
        self.length += len(path)
        self.drop_nodes()

    def drop_nodes(self) -> None:
        """Frees every kept node."""
        self.parents.clear()
        self.depths.clear()

    def close(self) -> None:
        """Returns the blocks to the pool and empties the table."""
        self._pool.blocks.give(self.blocks)
        self.blocks.clear()
        self.block_words = array("i")
        self._runs.clear()
        self.drop_nodes()
        self.length = 0

    def _add(self, blocks: Sequence[int]) -> None:
        self.blocks.extend(blocks)
        self.block_words.extend(blocks)
        for block in blocks:
            low = block * BLOCK
            if self._runs and self._runs[-1][1] == low:
                self._runs[-1] = (self._runs[-1][0], low + BLOCK)
            else:
                self._runs.append((low, low + BLOCK))

    def _check_chain(self, path: Sequence[int]) -> None:
        above, parents = -1, self.parents
        count = len(parents)
        for node in path:
            if not 0 <= node < count:
                raise ValueError(f"node {node} of the path {list(path)} is not one of the {count} kept nodes")
            if parents[node] != above:
                raise ValueError(
                    f"node {node} of the path {list(path)} has parent {parents[node]}, not {above}"
                )
            above = node

    def _below(self, node: int) -> list[int]:
        """Descendants of ``node``, in node order."""
        inside = {node}
        found = []
        for child in range(node + 1, self.nodes):
            if self.parents[child] in inside:
                inside.add(child)
                found.append(child)
        return found

    def _compact(self, order: Sequence[int]) -> None:
        """Moves nodes so that ``order[i]`` lies at slot ``length + i``.

        ``order`` ascends, so nodes only move down.
        """
        # Nodes ascend, so the last one is in place only if all are.
        if not order or order[-1] == len(order) - 1:
            return
        still = 0
        while order[still] == still:
            still += 1
        at = self.slots(self.length, self.length + order[-1] + 1)
        self._pool.copy([at[old] for old in order[still:]], at[still : len(order)])


def blocks_for(slots: int) -> int:
    """Number of blocks that hold ``slots`` slots."""
    return -(-slots // BLOCK)
