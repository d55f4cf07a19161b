"""One session's slot table: how many positions are committed, and which drafted rows lie beyond them.

The blocks of the table in order make its slots: slot ``i`` holds committed position ``i`` while ``i <
length``; node ``j`` lies at slot ``length + j``. Only full blocks of committed positions may have other
holders; what is written goes to blocks that this table alone holds.
"""

from collections.abc import Sequence

from outrider.lm.blocks import BLOCK
from outrider.lm.pool import Run, SlotPool


class SlotTable:
    """Cached positions and kept drafted rows of one session."""

    __slots__ = ("_pool", "_room", "_runs", "blocks", "depths", "length", "parents")

    def __init__(self, pool: SlotPool, room: int = 0) -> None:
        """Holds nothing yet. Of ``room`` tokens in all, so many are likely to be needed: where to begin."""
        self._pool = pool
        self._room = blocks_for(room)
        self._runs: list[Run] = []
        self.blocks: list[int] = []
        """Blocks held, in order of position."""
        self.length = 0
        """Committed positions whose keys and values are here."""
        self.parents: list[int] = []
        """Parent node of each kept node, -1 for the last committed position."""
        self.depths: list[int] = []
        """Depth of each kept node; a child of the last committed position has depth 0."""

    @classmethod
    def at(cls, pool: SlotPool, runs: Sequence[Run], length: int, parents: Sequence[int]) -> "SlotTable":
        """A table that lies in these runs of whole blocks, as somebody says who keeps count of them.

        It never grows and is never closed; ``parents`` are those of its kept nodes.
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
    def all_runs(self) -> Sequence[Run]:
        """Where its blocks lie in the pool, in order."""
        return self._runs

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begins an empty table with full blocks of committed positions that others hold too."""
        assert not self.blocks, "only an empty table can begin with others' blocks"
        self._pool.blocks.share(blocks)
        self._add(blocks)
        self.length = len(blocks) * BLOCK

    def copy_of(self, blocks: Sequence[int]) -> None:
        """Begins an empty table with a copy of such blocks, so that all of it lies together.

        Raises Overloaded, with nothing changed, where there is no room for it.
        """
        assert not self.blocks, "only an empty table can begin with others' blocks"
        self.reserve(len(blocks) * BLOCK)
        self.length = len(blocks) * BLOCK
        sources = [block * BLOCK + offset for block in blocks for offset in range(BLOCK)]
        self._pool.copy(sources, self.slots(0, self.length))

    def lacks(self, need: int) -> int:
        """Blocks that are missing for so many slots."""
        return max(0, blocks_for(need) - len(self.blocks))

    def reserve(self, need: int) -> None:
        """Holds at least ``need`` slots from now on. Raises Overloaded, with nothing changed."""
        if missing := self.lacks(need):
            after = self.blocks[-1] if self.blocks else None
            self._add(self._pool.take(missing, after, max(0, self._room - len(self.blocks))))

    def runs(self, low: int, high: int) -> list[Run]:
        """Where the slots ``[low, high)`` of the table lie in the pool, in order."""
        found = []
        begin = 0
        for start, end in self._runs:
            size = end - start
            if begin < high and begin + size > low:
                found.append((start + max(0, low - begin), start + min(size, high - begin)))
            begin += size
        return found

    def slots(self, low: int, high: int) -> list[int]:
        """The pool's slots of the table's slots ``[low, high)``."""
        return [slot for start, end in self.runs(low, high) for slot in range(start, end)]

    @property
    def nodes(self) -> int:
        """Kept drafted rows."""
        return len(self.parents)

    def commit(self, path: Sequence[int]) -> list[int]:
        """Makes the nodes of ``path`` committed positions.

        ``path`` is a chain of nodes from a child of the last committed position down. Nodes below its last
        node are kept and renumbered in order; all others are freed. An empty path commits nothing and keeps
        everything.

        Returns the new index of every old node, -1 for those that are no longer nodes. Raises ValueError if
        ``path`` is not such a chain.
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
        """Gives the blocks back; the table is empty then."""
        self._pool.blocks.give(self.blocks)
        self.blocks.clear()
        self._runs.clear()
        self.drop_nodes()
        self.length = 0

    def _add(self, blocks: Sequence[int]) -> None:
        self.blocks.extend(blocks)
        for block in blocks:
            low = block * BLOCK
            if self._runs and self._runs[-1][1] == low:
                self._runs[-1] = (self._runs[-1][0], low + BLOCK)
            else:
                self._runs.append((low, low + BLOCK))

    def _check_chain(self, path: Sequence[int]) -> None:
        above = -1
        for node in path:
            if not 0 <= node < self.nodes:
                raise ValueError(
                    f"node {node} of the path {list(path)} is not one of the {self.nodes} kept nodes"
                )
            if self.parents[node] != above:
                raise ValueError(
                    f"node {node} of the path {list(path)} has parent {self.parents[node]}, not {above}"
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
        """Moves nodes so that ``order[i]`` lies at slot ``length + i``. ``order`` ascends, so slots only move
        down."""
        still = 0
        while still < len(order) and order[still] == still:
            still += 1
        if still == len(order):
            return
        at = self.slots(self.length, self.length + order[-1] + 1)
        self._pool.copy([at[old] for old in order[still:]], at[still : len(order)])


def blocks_for(slots: int) -> int:
    """Blocks that hold so many slots."""
    return -(-slots // BLOCK)
