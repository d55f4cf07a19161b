"""Which queries of a pass attend over which tiles of keys: worked out once per pass and sliding window.

A tile whose keys lie in order of position in a session's slots is read in place. Tiles with drafted positions
do not lie so: a node's slot follows from its number, its position from its depth. So for each path of a tree
these tiles are gathered by position, in the order in which their keys will lie once they are committed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm.deterministic.kernel import GROUP, HIDDEN, TILE
from outrider.lm.plan import PackedRows


@dataclass(frozen=True, slots=True)
class Block:
    """A block of one session's rows, and the tiles of keys that they see."""

    session: int
    """Index of the session in the pass."""
    low: int
    """First row of the block, counted in the pass."""
    high: int
    """Row behind the block's last."""
    first: int
    """First tile that a row of the block sees."""
    whole: int
    """Tile behind the last tile that is read in place; later tiles are gathered."""
    tiles: int
    """Tile behind the last tile that a row of the block sees."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """One tile of keys gathered along one path of a tree."""

    rows: Sequence[int]
    """Rows of the pass that see the tile."""
    session: int
    """Index of the session in the pass."""
    tile: int
    """Number of the tile: its positions begin at ``TILE * tile``."""
    slots: NDArray[np.int64]
    """Slot of each key in the session's table."""
    hidden: NDArray[np.bool_]
    """Positions that each row may not see: ``[rows, TILE]``."""


@dataclass(slots=True)
class Slab:
    """Blocks of rows whose tiles are combined at once; ``low`` and ``high`` bound their rows in the pass."""

    low: int
    high: int
    blocks: list[Block] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)


def first_tile(rows: PackedRows, window: int | None) -> int:
    """Number of the first tile that any of the session's rows sees."""
    return 0 if window is None else max(0, min(rows.positions) + 1 - window) // TILE


def whole_tiles(rows: PackedRows) -> int:
    """Number of tiles whose keys lie in order of position: all full tiles of a chain, else the committed."""
    ordered = rows.table.length + len(rows.parents) if rows.is_chain else rows.table.length
    return ordered // TILE


def base_tile(first: int) -> int:
    """Number of the first tile in the group of tile ``first``."""
    return first // GROUP * GROUP


def slabs(sessions: Sequence[PackedRows], window: int | None, size: int, most: int) -> list[Slab]:
    """Cuts the pass into slabs of blocks of ``size`` rows; ``most`` bounds rows times tiles of a slab."""
    found: list[Slab] = []
    tiles = 0
    for index, rows in enumerate(sessions):
        for low in range(rows.low, rows.high, size):
            block = _block(rows, index, low, min(low + size, rows.high), window)
            tiles = max(tiles, block.tiles)
            if not found or (block.high - found[-1].low) * tiles > most:
                found.append(Slab(block.low, block.high))
                tiles = block.tiles
            slab = found[-1]
            slab.high = block.high
            slab.blocks.append(block)
            slab.gathered += _gather(rows, block, window)
    return found


def hidden_in(positions: Sequence[int], first: int, last: int, window: int | None) -> NDArray[np.bool_]:
    """Which positions of the tiles ``[first, last)`` rows at these positions may not see, by position alone.

    bool ``[rows, TILE * tiles]``; of a single tile where no position is hidden.
    """
    over = window is None or first * TILE > max(positions) - window
    if over and last * TILE <= min(positions) + 1:
        return np.zeros((len(positions), TILE), dtype=bool)
    own = np.asarray(positions)[:, None]
    keys = np.arange(first * TILE, last * TILE)[None]
    hidden: NDArray[np.bool_] = keys > own
    if window is not None:
        hidden |= keys <= own - window
    return hidden


def additive(hidden: NDArray[np.bool_], groups: int, block: int) -> torch.Tensor:
    """Additive mask ``[tiles, 1, block, TILE]`` from ``hidden [rows, TILE * tiles]``.

    Each row has ``groups`` queries.
    """
    rows = hidden.shape[0]
    mask = np.zeros((hidden.shape[1] // TILE, 1, block, TILE), dtype=np.float32)
    by_tile = hidden.reshape(rows, -1, TILE).transpose(1, 0, 2)
    mask[:, 0, : rows * groups] = np.repeat(by_tile, groups, axis=1) * np.float32(HIDDEN)
    return torch.from_numpy(mask)


def _block(rows: PackedRows, session: int, low: int, high: int, window: int | None) -> Block:
    positions = rows.positions[low - rows.low : high - rows.low]
    first = 0 if window is None else max(0, min(positions) + 1 - window) // TILE
    last = max(positions) // TILE + 1
    return Block(session, low, high, first, max(first, min(whole_tiles(rows), last)), last)


def _gather(rows: PackedRows, block: Block, window: int | None) -> Iterator[Gathered]:
    if block.whole == block.tiles:
        return
    length = rows.table.length
    for members, path in _paths(rows, block):
        positions = [rows.positions[row - rows.low] for row in members]
        for tile in range(block.whole, (length + len(path) - 1) // TILE + 1):
            slots = np.arange(tile * TILE, (tile + 1) * TILE)
            drafted = slots >= length
            # No row sees positions past the path; any slot that was written will do.
            depths = np.minimum(slots[drafted] - length, len(path) - 1)
            slots[drafted] = length + np.asarray(path)[depths]
            hidden = hidden_in(positions, tile, tile + 1, window)
            yield Gathered(members, block.session, tile, slots, hidden)


def _paths(rows: PackedRows, block: Block) -> Iterator[tuple[list[int], list[int]]]:
    """Paths of nodes that together hold every row of the block, each with the rows that attend along it."""
    kept = rows.table.nodes
    left = set(range(block.low, block.high))
    for row in range(block.high - 1, block.low - 1, -1):
        if row not in left:
            continue
        path = []
        node = kept + row - rows.low
        while node >= 0:
            path.append(node)
            node = rows.parents[node]
        path.reverse()
        members = [at for at in (node - kept + rows.low for node in path) if at in left]
        left -= set(members)
        yield members, path
