"""One session that runs as a chain: its slots, the state of its recurrent layers, and the ids that it owes.

A state has one past: it cannot go back to the last accepted row of a pass. So the state stays where it was
before the pass, and the accepted ids are owed: the next pass runs these ids once more ahead of its own
rows. Keys and values of owed ids are in their slots and are not written again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.lm.chains.layers import State
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.table import SlotTable

if TYPE_CHECKING:
    from outrider.lm.chains.pool import ChainPool

MOST_OWED = BLOCK
"""Number of owed ids from which a pass runs them in a call of their own, so that they never grow further."""

LONG = 2 * BLOCK
"""Number of rows from which a pass keeps the state at its last block border: it reads a part of a prompt."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The rows of one session in the last pass."""

    tokens: Sequence[int]
    states: Mapping[int, State]
    """States by the number of rows before them."""


class ChainTable(SlotTable):
    """Cached positions of one session, and its state. No node outlives a commit."""

    __slots__ = ("_chains", "_passing", "_placed", "owed", "ran", "state")

    def __init__(self, pool: "ChainPool", room: int = 0) -> None:
        """Starts without blocks and without a state. `ChainPool.table` has taken the table's places."""
        super().__init__(pool, room)
        self._chains = pool
        self._placed = True
        self._passing: int | None = None
        self.state: State | None = None
        """State behind the first `length` - len(`owed`) positions; None: behind none."""
        self.owed: list[int] = []
        """Ids of the committed positions behind the state."""
        self.ran: Ran | None = None
        """What the last pass left; None once it was committed or dropped."""

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begins an empty table with full blocks; a state is kept behind the last one."""
        super().adopt(blocks)
        self._resume(blocks)

    def copy_of(self, blocks: Sequence[int]) -> None:
        """Begins an empty table with a copy of full blocks; a state is kept behind the last one."""
        super().copy_of(blocks)
        self._resume(blocks)

    def commit(self, path: Sequence[int]) -> list[int]:
        """Makes the nodes of ``path`` committed positions and frees all others: -1 for every old node."""
        if not path:
            return list(range(self.nodes))
        gone = [-1] * self.nodes
        self.keep(path)
        return gone

    def keep(self, path: Sequence[int]) -> None:
        """Makes the nodes of ``path``, a chain, committed positions and frees all others."""
        ran, before = self.ran, self.length
        super().keep(path)
        if ran is not None and self._chains.state_bytes:
            self._advance(ran, before, len(path))

    def drop_nodes(self) -> None:
        """Frees every kept node."""
        super().drop_nodes()
        self.ran = None

    def close(self) -> None:
        """Returns blocks and places to the pool and empties the table."""
        super().close()
        self.state = None
        self.owed = []
        if self._placed:
            self._placed = False
            self._chains.give_places()

    def cuts(self, rows: int) -> list[int]:
        """Where a pass of ``rows`` rows begins another call, so that the state there is kept, in rows."""
        if not self._chains.state_bytes:
            return []
        found = [0] if len(self.owed) >= MOST_OWED else []
        border = (self.length + rows) // BLOCK * BLOCK - self.length
        return [*found, border] if rows >= LONG and border < rows else found

    def _advance(self, ran: Ran, before: int, count: int) -> None:
        """Takes the last state up to ``count`` rows; what lies behind is owed."""
        reached = max((rows for rows in ran.states if rows <= count), default=None)
        if reached is None:
            self.owed += ran.tokens[:count]
            return
        self.state = ran.states[reached]
        self.owed = list(ran.tokens[reached:count])
        for rows, state in ran.states.items():
            if 0 < rows <= count and (before + rows) % BLOCK == 0:
                block = self.blocks[(before + rows) // BLOCK - 1]
                self._remember(block, state, passing=len(ran.tokens) < LONG)

    def _remember(self, block: int, state: State, passing: bool) -> None:
        """Keeps the state behind a block; of those that decoding passes, a session keeps the last alone."""
        self._chains.remember(block, state)
        if passing:
            if self._passing is not None:
                self._chains.forget(self._passing)
            self._passing = block

    def _resume(self, blocks: Sequence[int]) -> None:
        if blocks and self._chains.state_bytes:
            self.state = self._chains.recall(blocks[-1])
