"""The memory of sessions that run as chains: slots as elsewhere, and places for states beside them.

A session with recurrent layers can go on from a cached prefix only where a state was kept at the prefix's
end. States are kept at block borders, beside the block that ends there, as long as there are places; the
least recently used goes first. A block without a state still serves sessions that go on from a later block.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from outrider.lm.chains.layers import State
from outrider.lm.chains.table import ChainTable
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import KVLayout, SlotPool
from speculative.errors import Overloaded

PLACES = 3
"""States that a session may have at once: the committed one, the one behind a pass's rows, one in between."""

LEAST_TABLES = 4
"""Least number of sessions for which there have to be places."""

_MOST_PLACES = 1024
_SPARE = 512
"""Slots of a session beyond the model's context, for drafted rows, where slots take no memory."""
_RETRY_AFTER_S = 1.0


class ChainMemory(NamedTuple):
    """How the memory of sessions is divided."""

    slots: int
    places: int
    """Number of states; 0 where the model has none."""

    @classmethod
    def divide(cls, memory: int, slot_bytes: int, state_bytes: int, max_length: int) -> "ChainMemory":
        """Divides ``memory`` bytes: states get half of it at most, or all where nothing attends."""
        if not state_bytes:
            return cls(memory // slot_bytes, 0)
        places = min((memory // 2 if slot_bytes else memory) // state_bytes, _MOST_PLACES)
        if not slot_bytes:
            return cls(places // PLACES * (max_length + _SPARE), places)
        return cls((memory - places * state_bytes) // slot_bytes, places)


class ChainPool(SlotPool):
    """Slots and states of all sessions of one model that runs chains."""

    chains_only = True

    def __init__(self, layout: KVLayout, memory: ChainMemory, state_bytes: int, initial_slots: int = 1024):
        """``state_bytes`` is the size of one state; 0: the model has none."""
        super().__init__(layout, memory.slots, initial_slots)
        self.state_bytes = state_bytes
        self.free_places = memory.places
        """Number of places that neither a session nor a kept state has."""
        self._kept: OrderedDict[int, State] = OrderedDict()
        self._most_tables = memory.places // PLACES if state_bytes else super().most_tables

    @property
    def most_tables(self) -> int:
        """Largest number of sessions that may have tables at once."""
        return self._most_tables

    @property
    def kept_states(self) -> int:
        """Number of states kept beside blocks."""
        return len(self._kept)

    def table(self, room: int = 0) -> ChainTable:
        """A table for a new session. Raises Overloaded where there is no place for its states."""
        self.take_places()
        return ChainTable(self, room)

    def take_places(self) -> None:
        """Takes a session's places. Raises Overloaded where there are too few."""
        if not self.state_bytes:
            return
        while self.free_places < PLACES and self._kept:
            self._drop(next(iter(self._kept)))
        if self.free_places < PLACES:
            raise Overloaded(
                f"a session needs {PLACES} places for states; {self.free_places} are free", _RETRY_AFTER_S
            )
        self.free_places -= PLACES

    def give_places(self) -> None:
        """Returns a session's places."""
        if self.state_bytes:
            self.free_places += PLACES

    def remember(self, block: int, state: State) -> None:
        """Keeps the state behind this block's last position, as far as there is a place."""
        if block not in self._kept:
            if not self.free_places and self._kept:
                self._drop(next(iter(self._kept)))
            if not self.free_places:
                return
            self.free_places -= 1
        self._kept[block] = state
        self._kept.move_to_end(block)

    def recall(self, block: int) -> State:
        """The state behind this block's last position, which `resumable` has found."""
        self._kept.move_to_end(block)
        return self._kept[block]

    def forget(self, block: int) -> None:
        """Drops the state kept beside this block, if there is one."""
        if block in self._kept:
            self._drop(block)

    def resumable(self, blocks: Sequence[int]) -> Sequence[int]:
        """The longest beginning of a cached prefix at whose end a state is kept."""
        if not self.state_bytes:
            return blocks
        ends = [end for end in range(len(blocks), 0, -1) if blocks[end - 1] in self._kept]
        return blocks[: ends[0]] if ends else ()

    def same(self, cached: int, own: int) -> None:
        """Moves a state to the cached block that holds the same ids, where that has none."""
        if own in self._kept and cached not in self._kept:
            self._kept[cached] = self._kept.pop(own)

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """Takes ``count`` blocks as `SlotPool.take` does; what they held before is gone, states included."""
        taken = super().take(count, after, room)
        for block in taken:
            self.forget(block)
        return taken

    def bytes(self) -> int:
        """Size of the storage allocated now and of the states kept beside blocks, in bytes."""
        return super().bytes() + len(self._kept) * self.state_bytes

    def _drop(self, block: int) -> None:
        del self._kept[block]
        self.free_places += 1


def least_bytes(slot_bytes: int, state_bytes: int) -> int:
    """Least memory with which a model can be served, in bytes."""
    states = LEAST_TABLES * PLACES * state_bytes
    return (2 * states if slot_bytes else states) or BLOCK * slot_bytes
