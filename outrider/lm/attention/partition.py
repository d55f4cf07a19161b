"""Partition of a step's rows among the programs of an attention kernel. Pure: numbers, no tensors.

Rows of one session make tiles, which read the session's slots once for all their rows. Where there are too
few tiles to keep a device busy, or one session's past is far longer than the others', the slots of a tile are
cut into items. The largest number of items depends on the number of rows alone, so that a captured graph fits
every step of its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.lm.attention.metadata import SPLIT_ITEMS, WORDS
from outrider.lm.plan import PackedRows

Ints = NDArray[np.int64]

_LEAST_SLOTS = 128
"""Smallest number of slots in an item: cutting finer costs more than it saves."""

_STEP = 64
"""Items begin at multiples of this number of slots from the first, so that the kernel's loop runs full."""


def items_of(rows: int) -> int:
    """Largest number of items in a step of ``rows`` rows, whatever its tiles are; see `cut`."""
    return rows + SPLIT_ITEMS


def trunk_of(rows: PackedRows) -> int:
    """Number of leading nodes of a session, a chain, that all its later nodes descend from."""
    parents = rows.parents
    if rows.is_chain:
        return len(parents)
    fork = next(node for node, parent in enumerate(parents) if parent != node - 1)
    return min(parents[fork:]) + 1


def branch_masks(rows: PackedRows, trunk: int, window: int | None) -> NDArray[np.int32]:
    """Masks over branching nodes, ``[rows, WORDS]``: bit ``j`` of a row is node ``trunk + j`` of its session.

    A row sees itself and its ancestors within the window.
    """
    packed = rows.ancestor_bits(4 * WORDS, trunk)
    if window is not None and max(rows.depths) >= window:
        depths = np.asarray(rows.depths)
        near = depths[None, trunk:] > depths[rows.table.nodes :, None] - window
        bits = np.packbits(near, axis=1, bitorder="little")
        packed = packed.copy()
        packed[:, : bits.shape[1]] &= bits
    return packed.view("<i4").reshape(-1, WORDS)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """A pass's rows and their tiles, in order of sessions; all arrays are int64."""

    sessions: Ints
    """``[sessions, 4]``: the first row, the row behind the last, committed length, number of kept nodes."""
    base: Ints
    """``[sessions]``: slot of the first branching node."""
    upto: Ints
    """``[rows]``: the slot behind the last one of committed positions and trunk that each row sees."""
    of_tile: Ints
    """``[tiles]``: session of each tile."""
    low: Ints
    """``[tiles]``: first row of each tile."""
    high: Ints
    """``[tiles]``: the row behind each tile's last."""

    @classmethod
    def of(cls, rows: Sequence[PackedRows], tile_rows: int) -> "RowTiles":
        """Cuts each session's rows into tiles of at most ``tile_rows`` rows."""
        sessions = np.array([(each.low, each.high, each.table.length, each.table.nodes) for each in rows])
        lows, highs, lengths, kept = sessions.T
        trunks = np.array([trunk_of(each) for each in rows])
        counts = highs - lows
        of_row = np.repeat(np.arange(len(rows)), counts)
        seen = np.arange(highs[-1]) + (kept - lows)[of_row] + 1
        tiles = -(-counts // tile_rows)
        of_tile = np.repeat(np.arange(len(rows)), tiles)
        low = lows[of_tile] + (np.arange(len(of_tile)) - (np.cumsum(tiles) - tiles)[of_tile]) * tile_rows
        return cls(
            sessions,
            lengths + trunks,
            lengths[of_row] + np.minimum(seen, trunks[of_row]),
            of_tile,
            low,
            np.minimum(low + tile_rows, highs[of_tile]),
        )

    def row_tile(self) -> Ints:
        """``[rows]``: tile of each row."""
        return np.repeat(np.arange(len(self.low)), self.high - self.low)

    def spans(self, first: Ints) -> tuple[Ints, Ints]:
        """For each tile the first slot that its rows see, and the slot behind the last.

        ``first`` is, for each row, the first slot of committed positions and trunk within the window.
        """
        lows, _, lengths, kept = self.sessions[self.of_tile].T
        end = lengths + kept + self.high - lows
        begin = np.minimum.reduceat(first, self.low)
        # A branching node may lie before the slot that equals its place in the window.
        base = self.base[self.of_tile]
        return np.where(end > base, np.minimum(begin, base), begin), end


def cut(begin: Ints, end: Ints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cuts the slots from ``begin`` to ``end`` of every tile into items.

    Tiles that are cut have at most SPLIT_ITEMS items together, which come first. Returns the items,
    ``[items, 3]`` (tile, first slot, slot behind the last), and for each tile its first item and the number
    of its items, ``[tiles, 2]``.
    """
    slots = end - begin
    # Of a tile that is cut, n times as long as an item, there are fewer than 2 n items.
    spare = max(SPLIT_ITEMS - len(slots), SPLIT_ITEMS // 2)
    size = max(_LEAST_SLOTS, -(-int(slots.sum()) // spare))
    size = -(-size // _STEP) * _STEP
    counts = -(-slots // size)
    order = np.argsort(counts == 1, kind="stable")
    of_item = np.repeat(order, counts[order])
    spans = np.empty((len(slots), 2), np.int64)
    spans[order, 0] = np.cumsum(counts[order]) - counts[order]
    spans[:, 1] = counts
    start = begin[of_item] + (np.arange(len(of_item)) - spans[of_item, 0]) * size
    return np.stack((of_item, start, np.minimum(start + size, end[of_item])), axis=1), spans
