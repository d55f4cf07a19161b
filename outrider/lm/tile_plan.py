"""Which queries of a pass attend over which tiles of keys: worked out once per pass and kind of layer.

A tile whose keys lie in their order in a session's slots is attended over where it lies. What a tree drafted
does not: a node lies behind all nodes before it, its position is that of its depth. So for each path of a
tree the tiles that hold drafted positions are gathered by position, which is where their keys will lie when
they are committed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm.plan import Rows
from outrider.lm.tile_kernel import GROUP, HIDDEN, TILE


@dataclass(frozen=True, slots=True)
class Block:
    """The rows ``[low, high)`` of a session, counted in the pass; ``tiles`` of them are seen from
    ``first``, those before ``whole`` where they lie."""

    session: int
    low: int
    high: int
    first: int
    whole: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """One tile of one path: which rows of the pass see it, the table's slot of each key, what they may not
    see."""

    rows: Sequence[int]
    session: int
    tile: int
    slots: NDArray[np.int64]
    hidden: NDArray[np.bool_]


@dataclass(slots=True)
class Slab:
    """Blocks whose results are put together at once."""

    low: int
    high: int
    blocks: list[Block] = field(default_factory=list)
    gathered: list[Gathered] = field(default_factory=list)


def first_tile(rows: Rows, window: int | None) -> int:
    """The first tile that any of the session's rows sees."""
    return 0 if window is None else max(0, min(rows.positions) + 1 - window) // TILE


def whole_tiles(rows: Rows) -> int:
    """Tiles whose keys lie in order of position: of a chain all that are full, else those committed."""
    ordered = rows.table.length + len(rows.parents) if rows.is_chain else rows.table.length
    return ordered // TILE


def base_tile(first: int) -> int:
    """Where the groups of tiles begin that hold this one."""
    return first // GROUP * GROUP


def slabs(sessions: Sequence[Rows], window: int | None, size: int, most: int) -> list[Slab]:
    """The pass in slabs of blocks of ``size`` rows; ``most`` bounds rows times tiles of a slab."""
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
    """bool ``[rows, TILE * tiles]``: which positions of the tiles ``[first, last)`` rows at these positions
    may not see, were all of them on their path; of one tile where nothing is hidden."""
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
    """The mask ``[tiles, 1, block, TILE]`` of rows each of which has ``groups`` queries: bool ``[rows, TILE *
    tiles]``."""
    rows = hidden.shape[0]
    mask = np.zeros((hidden.shape[1] // TILE, 1, block, TILE), dtype=np.float32)
    by_tile = hidden.reshape(rows, -1, TILE).transpose(1, 0, 2)
    mask[:, 0, : rows * groups] = np.repeat(by_tile, groups, axis=1) * np.float32(HIDDEN)
    return torch.from_numpy(mask)


def _block(rows: Rows, session: int, low: int, high: int, window: int | None) -> Block:
    positions = rows.positions[low - rows.low : high - rows.low]
    first = 0 if window is None else max(0, min(positions) + 1 - window) // TILE
    last = max(positions) // TILE + 1
    return Block(session, low, high, first, max(first, min(whole_tiles(rows), last)), last)


def _gather(rows: Rows, block: Block, window: int | None) -> Iterator[Gathered]:
    if block.whole == block.tiles:
        return
    length = rows.table.length
    for members, path in _paths(rows, block):
        positions = [rows.positions[row - rows.low] for row in members]
        for tile in range(block.whole, (length + len(path) - 1) // TILE + 1):
            slots = np.arange(tile * TILE, (tile + 1) * TILE)
            drafted = slots >= length
            # Positions past the path are seen by nobody; any slot that was written will do.
            depths = np.minimum(slots[drafted] - length, len(path) - 1)
            slots[drafted] = length + np.asarray(path)[depths]
            hidden = hidden_in(positions, tile, tile + 1, window)
            yield Gathered(members, block.session, tile, slots, hidden)


def _paths(rows: Rows, block: Block) -> Iterator[tuple[list[int], list[int]]]:
    """Paths of nodes that together hold every row of the block, and which rows each answers for."""
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
