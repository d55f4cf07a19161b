"""The KV cache of one pass under the deterministic profile: attention by tiles of positions.

Positions alone decide the order in which a row's keys are added; see `kernel.py`. Keys and values lie in
the slots of `SlotCache`, in float32 where the model computes in less. Knows nothing about trees; see
`plan.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm.attention.interface import AttentionParams, SlotCache
from outrider.lm.deterministic.kernel import (
    GROUP,
    HIDDEN,
    TILE,
    TileKernel,
    TileShape,
    UnsteadyTiles,
    combine,
)
from outrider.lm.deterministic.plan import (
    Block,
    Gathered,
    Slab,
    additive,
    base_tile,
    first_tile,
    hidden_in,
    slabs,
    whole_tiles,
)
from outrider.lm.kv.pool import SlotPool
from outrider.lm.plan import PassPlan

_SLAB_NUMBERS = 2**20
"""About the largest number of elements that the results of a slab's tiles hold."""

Kernels = dict[TileShape, TileKernel]
"""Kernels of one model, by shape."""


@dataclass(frozen=True, slots=True)
class _Direct:
    """One call over tiles that are read in place."""

    block: Block
    """Rows of the call and the tiles that they see."""
    queries: int
    """Number of queries with padding."""
    offset: int
    """Offset of the first tile's first key among the keys that the session sees."""
    at: int
    """Index of the first tile among the tiles of the slab."""
    mask: torch.Tensor
    """Additive mask ``[tiles, 1, queries, TILE]``."""


@dataclass(frozen=True, slots=True)
class _Indirect:
    """One call over gathered tiles whose queries fit the same block."""

    queries: torch.Tensor
    """Indices of the queries to gather."""
    slots: torch.Tensor
    """Slots of the keys and values to gather."""
    mask: torch.Tensor
    """Additive mask ``[tiles, 1, queries, TILE]``."""
    targets: torch.Tensor
    """Places of the results among the slab's partial results."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A slab with its index tensors and masks."""

    low: int
    high: int
    tiles: int
    direct: tuple[_Direct, ...]
    indirect: tuple[_Indirect, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Inputs that layers of one window and shape share in a pass."""

    seen: tuple[Sequence[torch.Tensor] | None, ...]
    """For each session the planes of its tiles that are read in place; None: there are no such tiles."""
    slabs: tuple[_Ready, ...]


class TileCache(SlotCache):
    """Attention of one deterministic pass, and its access to the keys and values in the pool.

    The model's forward takes it as its `Cache`, so an object lives for one pass only.
    """

    def __init__(self, model_type: str, pool: SlotPool, plan: PassPlan, kernels: Kernels) -> None:
        """``kernels`` holds the kernels of the model by shape; the pass adds new ones."""
        super().__init__(model_type, pool, plan)
        self._pool = pool
        self._kernels = kernels
        self._kinds: dict[tuple[int | None, TileShape], _Kind] = {}
        self._tables: dict[int, NDArray[np.int64]] = {}

    def compute(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
        layer: int,
    ) -> torch.Tensor:
        """Attention of one layer, tile by tile; stores the layer's new keys and values in the pool first.

        Rows behind those of the plan only fill up the pass: their keys and values are neither stored nor
        attended.
        """
        rows, heads = self._plan.row_count, keys.shape[1]
        dtype = self._pool.layout.dtype
        self._write(keys[:, :, :rows].to(dtype), values[:, :, :rows].to(dtype), 2 * layer)
        groups = query.shape[1] // heads
        shape = TileShape(
            heads, groups, keys.shape[3], values.shape[3], params.softcap, self._pool.layout.device, dtype
        )
        kernel = self._kernel(shape)
        key = (params.window, shape)
        if key not in self._kinds:
            self._kinds[key] = self._kind(params.window, kernel)
        kind = self._kinds[key]
        spare = kernel.blocks[-1]
        flat = query.new_zeros(heads, rows * groups + spare, shape.width, dtype=dtype)
        own = flat[:, : rows * groups].view(heads, rows, groups, shape.width)
        own.copy_(query[0, :, :rows].unflatten(0, (heads, groups)).transpose(1, 2))
        output = query.new_zeros(1, query.shape[2], query.shape[1], shape.value_width)
        made = output[0].view(-1, heads, groups, shape.value_width)
        seen = [None if of is None else (of[2 * layer][0], of[2 * layer + 1][0]) for of in kind.seen]
        for slab in kind.slabs:
            mixed = self._slab(flat, slab, seen, kernel, params, 2 * layer)
            made[slab.low : slab.high] = mixed.unflatten(0, (-1, groups)).transpose(1, 2)
        return output

    def _slab(
        self,
        flat: torch.Tensor,
        slab: _Ready,
        seen: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        kernel: TileKernel,
        params: AttentionParams,
        plane: int,
    ) -> torch.Tensor:
        """Attention ``[queries, heads, value_width]`` of the slab's rows."""
        shape = kernel.shape
        groups = shape.groups
        scale = shape.width**-0.5 if params.scaling is None else params.scaling
        count = (slab.high - slab.low) * groups
        # The last place takes the results of queries that pad a block.
        parts = flat.new_zeros(slab.tiles * count + 1, shape.heads, shape.value_width)
        spreads = flat.new_full((slab.tiles * count + 1, shape.heads), HIDDEN)
        by_tile = parts[:-1].view(slab.tiles, count, shape.heads, -1)
        spreads_by_tile = spreads[:-1].view(slab.tiles, count, shape.heads)
        for call in slab.direct:
            mine = seen[call.block.session]
            assert mine is not None, "tiles that lie in order are seen"
            tiles = call.mask.shape[0]
            keys, values = (
                part[:, call.offset : call.offset + tiles * TILE].unflatten(1, (tiles, TILE)).transpose(0, 1)
                for part in mine
            )
            low = call.block.low * groups
            query = flat[:, low : low + call.queries].expand(tiles, -1, -1, -1)
            mixed, spread = kernel.attend(query, keys, values, call.mask, scale)
            at, low = slice(call.at, call.at + tiles), low - slab.low * groups
            high = low + (call.block.high - call.block.low) * groups
            by_tile[at, low:high] = mixed[:, : high - low]
            spreads_by_tile[at, low:high] = spread[:, : high - low]
        for gathered in slab.indirect:
            mixed, spread = self._gathered(flat, gathered, kernel, scale, plane)
            parts.index_copy_(0, gathered.targets, mixed.flatten(0, 1))
            spreads.index_copy_(0, gathered.targets, spread.flatten(0, 1))
        return combine(by_tile, spreads_by_tile, _sinks_of(params, shape, slab))

    def _gathered(
        self, flat: torch.Tensor, call: _Indirect, kernel: TileKernel, scale: float, plane: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = call.mask.shape[0]
        planes = self._pool.planes()
        query, keys, values = (
            source.index_select(1, index).unflatten(1, (tiles, -1)).transpose(0, 1)
            for source, index in (
                (flat, call.queries),
                (planes[plane], call.slots),
                (planes[plane + 1], call.slots),
            )
        )
        return kernel.attend(query, keys, values, call.mask, scale)

    def _kernel(self, shape: TileShape) -> TileKernel:
        if shape not in self._kernels:
            try:
                self._kernels[shape] = TileKernel(shape)
            except UnsteadyTiles as error:
                raise self.refusal(
                    "on this machine attention over a tile of keys depends on what is computed beside it; "
                    "the deterministic profile cannot hold"
                ) from error
        return self._kernels[shape]

    def _kind(self, window: int | None, kernel: TileKernel) -> _Kind:
        sessions = self._plan.rows
        seen: list[Sequence[torch.Tensor] | None] = []
        for rows in sessions:
            first, whole = first_tile(rows, window), whole_tiles(rows)
            runs = rows.table.runs(first * TILE, whole * TILE) if whole > first else []
            seen.append(self._pool.seen(runs) if runs else None)
        shape = kernel.shape
        most = _SLAB_NUMBERS // (shape.heads * shape.groups * shape.value_width)
        found = slabs(sessions, window, kernel.rows, most)
        return _Kind(tuple(seen), tuple(self._ready(slab, window, kernel) for slab in found))

    def _ready(self, slab: Slab, window: int | None, kernel: TileKernel) -> _Ready:
        sessions, groups = self._plan.rows, kernel.shape.groups
        bases = {
            block.session: base_tile(first_tile(sessions[block.session], window)) for block in slab.blocks
        }
        deepest = max(block.tiles - bases[block.session] for block in slab.blocks)
        direct = []
        for block in slab.blocks:
            if block.whole == block.first:
                continue
            rows = sessions[block.session]
            positions = rows.positions[block.low - rows.low : block.high - rows.low]
            hidden = hidden_in(positions, block.first, block.whole, window)
            queries = kernel.block_for((block.high - block.low) * groups)
            offset = (block.first - first_tile(rows, window)) * TILE
            tiles = block.whole - block.first
            mask = self._mask(additive(hidden, groups, queries)).expand(tiles, -1, -1, -1)
            direct.append(_Direct(block, queries, offset, block.first - bases[block.session], mask))
        tiles = -(-deepest // GROUP) * GROUP
        return _Ready(
            slab.low, slab.high, tiles, tuple(direct), tuple(self._indirect(slab, bases, tiles, kernel))
        )

    def _indirect(
        self, slab: Slab, bases: dict[int, int], tiles: int, kernel: TileKernel
    ) -> Iterator[_Indirect]:
        """The slab's calls over gathered tiles, one for each size of block."""
        by_block: dict[int, list[tuple[Gathered, int]]] = {}
        for tile in slab.gathered:
            block = kernel.block_for(len(tile.rows) * kernel.shape.groups)
            by_block.setdefault(block, []).append((tile, tile.tile - bases[tile.session]))
        for block, found in by_block.items():
            yield self._gathering(found, block, kernel.shape.groups, slab, tiles)

    def _gathering(
        self, found: list[tuple[Gathered, int]], block: int, groups: int, slab: Slab, tiles: int
    ) -> _Indirect:
        count = (slab.high - slab.low) * groups
        queries = np.zeros((len(found), block), dtype=np.int64)
        targets = np.full((len(found), block), tiles * count)
        slots, masks = [], []
        for at, (tile, into) in enumerate(found):
            own = (np.asarray(tile.rows)[:, None] * groups + np.arange(groups)).reshape(-1)
            queries[at, : len(own)] = own
            targets[at, : len(own)] = into * count + own - slab.low * groups
            slots.append(self._slots_of(tile.session)[tile.slots])
            masks.append(additive(tile.hidden, groups, block))
        device = self._pool.layout.device
        gathered = (torch.from_numpy(of.reshape(-1)).to(device) for of in (queries, np.stack(slots), targets))
        query_index, slot_index, target_index = gathered
        return _Indirect(query_index, slot_index, self._mask(torch.cat(masks)), target_index)

    def _slots_of(self, session: int) -> NDArray[np.int64]:
        """Slots in the pool of a session's table, in order."""
        if session not in self._tables:
            rows = self._plan.rows[session]
            runs = rows.table.runs(0, rows.table.length + len(rows.parents))
            self._tables[session] = np.concatenate([np.arange(low, high) for low, high in runs])
        return self._tables[session]

    def _mask(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.to(self._pool.layout.device, self._pool.layout.dtype)


def _sinks_of(params: AttentionParams, shape: TileShape, slab: _Ready) -> torch.Tensor | None:
    """Attention sinks ``[queries, heads]`` of the slab in the pool's dtype, or None."""
    if params.sinks is None:
        return None
    by_query = params.sinks.to(shape.dtype).view(shape.heads, shape.groups).t()
    return by_query.repeat(slab.high - slab.low, 1)
