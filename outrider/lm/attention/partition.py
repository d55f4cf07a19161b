"""Partition of a step's rows among the programs of an attention kernel. Pure: numbers, no tensors.

Rows of one session make tiles, which read the session's slots once for all their rows. Where there are too
few tiles to keep a device busy, the slots of a tile are cut into items. The largest number of items depends
on the number of rows alone, so that a captured graph fits every step of its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.lm.attention.metadata import MOST_NODES, SPLIT_ITEMS, WORDS
from outrider.lm.plan import PackedRows

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Row counts to which steps are padded. Beyond some hundred rows a GPU is bound by computation, and padding
costs its share."""

_LEAST_SLOTS = 128
"""Smallest number of slots in an item: cutting finer costs more than it saves."""

_STEP = 64
"""Items begin at multiples of this number of slots from the first, so that the kernel's loop runs full."""

_SMALL, _LARGE = 16, 64
"""Number of queries in a small and in a large tile: rows times query heads that share a key head."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The static shape of a step; each shape has one captured graph."""

    rows: int
    """Number of rows with padding: one of BUCKETS."""
    tile_rows: int
    """Largest number of rows in a tile."""

    @property
    def items(self) -> int:
        """Number of items with padding."""
        return items_of(self.rows)


def items_of(rows: int) -> int:
    """Largest number of items in a step of ``rows`` rows: at least one per tile, whatever the tiles are."""
    return max(rows, SPLIT_ITEMS)


def graph_shape(rows: Sequence[PackedRows], groups: int) -> GraphShape:
    """The smallest shape that holds the rows of a pass; ``groups`` query heads share a key head."""
    count = rows[-1].high
    longest = max(each.high - each.low for each in rows)
    small = max(1, _SMALL // groups)
    tile = small if longest <= small else max(1, _LARGE // groups)
    return GraphShape(next(bucket for bucket in BUCKETS if bucket >= count), tile)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows ``[low, high)`` of the pass, all of one session."""

    rows: PackedRows
    low: int
    high: int


def tiles_of(rows: Sequence[PackedRows], tile_rows: int) -> list[Tile]:
    """Cuts each session's rows into tiles of at most ``tile_rows`` rows."""
    return [
        Tile(each, low, min(low + tile_rows, each.high))
        for each in rows
        for low in range(each.low, each.high, tile_rows)
    ]


def first_seen(rows: PackedRows, window: int | None) -> list[int]:
    """For each row the first committed position within the sliding window."""
    if window is None:
        return [0] * len(rows.positions)
    return [max(0, position + 1 - window) for position in rows.positions]


def node_masks(rows: PackedRows, window: int | None) -> NDArray[np.int32]:
    """Node masks ``[rows, WORDS]``: bit ``j`` of a row is set if the row may see node ``j`` of its session.

    A row sees itself and its ancestors within the window.
    """
    packed = rows.ancestor_bits(MOST_NODES // 8)
    if window is not None and max(rows.depths) >= window:
        depths = np.asarray(rows.depths)
        near = depths[None, :] > depths[rows.table.nodes :, None] - window
        bits = np.packbits(near, axis=1, bitorder="little")
        packed = packed.copy()
        packed[:, : bits.shape[1]] &= bits
    return packed.view("<i4").reshape(-1, WORDS)


def cut(spans: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Cuts the slots ``[low, high)`` of every tile into items: at most SPLIT_ITEMS, or one per tile.

    Returns the items (tile, low, high), tile by tile, and the number of items of each tile.
    """
    spare = SPLIT_ITEMS - len(spans)
    slots = sum(high - low for low, high in spans)
    chunk = max(_LEAST_SLOTS, -(-slots // spare)) if spare > 0 else max(high - low for low, high in spans)
    chunk = -(-chunk // _STEP) * _STEP
    items = [
        (tile, start, min(start + chunk, high))
        for tile, (low, high) in enumerate(spans)
        for start in range(low, high, chunk)
    ]
    return items, [-(-(high - low) // chunk) for low, high in spans]
