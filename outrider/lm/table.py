"""One session's slot table: how many positions are committed, and which drafted rows lie beyond them.

Slot ``i`` of the session's range holds committed position ``i`` while ``i < length``; node ``j`` lies at slot
``length + j``. So everything a row may see is one contiguous view, and only drafted rows ever need a mask.
"""

from collections.abc import Sequence

from outrider.lm.pool import SlotPool


class SlotTable:
    """Cached positions and kept drafted rows of one session."""

    __slots__ = ("_pool", "depths", "length", "parents", "slots")

    def __init__(self, pool: SlotPool, reserve: int = 0) -> None:
        """Takes room for ``reserve`` tokens at once; raises Overloaded if the pool has not got it."""
        self._pool = pool
        self.slots = pool.open()
        self.length = 0
        """Committed positions whose keys and values are here."""
        self.parents: list[int] = []
        """Parent node of each kept node, -1 for the last committed position."""
        self.depths: list[int] = []
        """Depth of each kept node; a child of the last committed position has depth 0."""
        try:
            pool.reserve(self.slots, reserve)
        except BaseException:
            pool.close(self.slots)
            raise

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

    def drop_nodes(self) -> None:
        """Frees every kept node."""
        self.parents.clear()
        self.depths.clear()

    def close(self) -> None:
        """Gives the slots back; the table is not to be used again."""
        self._pool.close(self.slots)
        self.drop_nodes()
        self.length = 0

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

    def _compact(self, order: list[int]) -> None:
        """Moves nodes so that ``order[i]`` lies at slot ``length + i``. ``order`` ascends, so slots only move
        down."""
        still = 0
        while still < len(order) and order[still] == still:
            still += 1
        if still == len(order):
            return
        first = self.slots.start + self.length
        self._pool.gather([first + old for old in order[still:]], first + still)
