"""The inputs of a step of static shape: one block of memory, filled on the host and sent in one copy.

Every field lies at the same address in every step, so a captured graph finds it there. Knows nothing about
models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm import transfer
from outrider.lm.attention.metadata import MOST_NODES, WORDS, AttentionMetadata
from outrider.lm.attention.partition import (
    BUCKETS,
    GraphShape,
    cut,
    first_seen,
    items_of,
    node_masks,
    tiles_of,
)
from outrider.lm.plan import PackedRows, PassPlan

_MOST_TAIL = 2**24
"""Largest size of block tables and slot copies together, in bytes."""

_ROWS = BUCKETS[-1]


@dataclass(frozen=True, slots=True)
class _Field:
    """One array at a fixed address: its host side and its device side."""

    host: NDArray[np.int64 | np.int32]
    device: torch.Tensor


class _Memory:
    """Fields laid out one after another in a block of memory, alike on host and device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.host = transfer.pinned(size, device)
        self.device = transfer.device_side(self.host, device)
        self.used = 0

    def take(self, dtype: torch.dtype, *shape: int) -> _Field:
        size = prod(shape) * dtype.itemsize
        low, self.used = self.used, self.used + size + -size % 16
        host, device = (side[low : low + size].view(dtype).view(shape) for side in (self.host, self.device))
        return _Field(host.numpy(), device)


class _Kind:
    """Fields of the step's attention metadata for layers of one sliding window."""

    def __init__(self, memory: _Memory) -> None:
        self.items = memory.take(torch.int32, items_of(_ROWS), 3)
        self.spans = memory.take(torch.int32, _ROWS, 2)
        self.first = memory.take(torch.int32, _ROWS)
        self.masks = memory.take(torch.int32, _ROWS, WORDS)


class GraphInputs:
    """Inputs of a step: ids, positions, slots, attention metadata, and the slots to copy before the step.

    Args:
        windows: sliding windows of the layers that have one, in positions.
        blocks: largest number of blocks that all sessions of a step may have together.
        device: device on which steps run.
    """

    def __init__(self, windows: Sequence[int], blocks: int, device: torch.device) -> None:
        tail = min(_MOST_TAIL, 4 * blocks + 2**16)
        kinds: list[int | None] = [None, *windows]
        head = 8 * 4 * _ROWS + 4 * 5 * _ROWS
        head += len(kinds) * 4 * _ROWS * (3 + 2 + 1 + WORDS)
        memory = _Memory(head + tail, device)
        self._memory = memory
        self.ids = memory.take(torch.int64, _ROWS)
        self.positions = memory.take(torch.int64, _ROWS)
        self.slots = memory.take(torch.int64, _ROWS)
        self.wanted = memory.take(torch.int64, _ROWS)
        self._tiles = memory.take(torch.int32, _ROWS, 4)
        self._row_tile = memory.take(torch.int32, _ROWS)
        self._kinds = {window: _Kind(memory) for window in kinds}
        self._head = memory.used
        self._tables = memory.take(torch.int32, tail // 4)
        self._copies = _Field(
            self._tables.host[: tail // 8 * 2].view(np.int64),
            self._tables.device[: tail // 8 * 2].view(torch.int64),
        )

    def add_asks(self, words: int) -> None:
        """Makes room for the asks of wanted rows, ``words`` int64 words each; digests are made from them."""
        device = self._memory.device.device
        self._ask_memory = _Memory(8 * words * _ROWS, device)
        self.asks = self._ask_memory.take(torch.int64, _ROWS, words)
        # Padding rows are digested too, and what they name has to exist.
        self._ask_memory.host.zero_()
        self._ask_memory.device.zero_()

    def send_asks(self, words: NDArray[np.int64]) -> None:
        """Sends the asks of a pass's wanted rows, int64 ``[n, words]``, in a copy of their own."""
        self.asks.host[: len(words)] = words
        transfer.upload(self._ask_memory.host, self._ask_memory.device, words.nbytes)

    def fits(self, plan: PassPlan, copies: int) -> bool:
        """Whether the fields have room for the pass of this plan and for ``copies`` slots to copy."""
        if plan.row_count > _ROWS or max(len(rows.parents) for rows in plan.rows) > MOST_NODES:
            return False
        blocks = sum(len(rows.table.blocks) for rows in plan.rows)
        return 4 * (blocks + 2) + 16 * copies <= 4 * len(self._tables.host)

    def fill(
        self, plan: PassPlan, shape: GraphShape, ids: Sequence[int], wanted: Sequence[int], scratch: int
    ) -> None:
        """Writes the inputs of a pass; padding rows write to the slot ``scratch`` and see no slot."""
        count = plan.row_count
        slots = [slot for low, high in plan.written() for slot in range(low, high)]
        for field, values, rest in (
            (self.ids, ids, 0),
            (self.positions, plan.positions(), 0),
            (self.slots, slots, scratch),
            (self.wanted, wanted, 0),
        ):
            field.host[: len(values)] = values
            field.host[len(values) : shape.rows] = rest
        tiles = tiles_of(plan.rows, shape.tile_rows)
        starts = self._fill_tables(plan.rows)
        self._tiles.host[: len(tiles)] = [
            (tile.low, tile.high - tile.low, starts[id(tile.rows)], tile.rows.table.length) for tile in tiles
        ]
        self._row_tile.host[:count] = np.repeat(range(len(tiles)), [tile.high - tile.low for tile in tiles])
        self._row_tile.host[count : shape.rows] = -1
        for window, kind in self._kinds.items():
            first = [since for rows in plan.rows for since in first_seen(rows, window)]
            kind.first.host[:count] = first
            for rows in plan.rows:
                kind.masks.host[rows.low : rows.high] = node_masks(rows, window)
            spans = [
                (
                    min(*first[tile.low : tile.high], tile.rows.table.length),
                    tile.rows.table.length + len(tile.rows.parents),
                )
                for tile in tiles
            ]
            items, counts = cut(spans)
            kind.items.host[: len(items)] = items
            kind.items.host[len(items) : shape.items] = 0
            kind.spans.host[: len(tiles), 1] = counts
            kind.spans.host[: len(tiles), 0] = np.cumsum(counts) - counts
            kind.spans.host[len(tiles) : shape.rows] = 0

    def send(self, copies: Mapping[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sends all fields in one copy; returns targets and sources of ``copies`` on the device, or None."""
        first = -(-self._filled // 2)
        end = first + 2 * len(copies)
        self._copies.host[first : first + len(copies)] = list(copies.keys())
        self._copies.host[first + len(copies) : end] = list(copies.values())
        transfer.upload(self._memory.host, self._memory.device, self._head + 8 * end)
        if not copies:
            return None
        both = self._copies.device[first:end].view(2, len(copies))
        return both[0], both[1]

    def metadata(self, shape: GraphShape) -> dict[int | None, AttentionMetadata]:
        """Attention metadata that the kernels of a step of this shape read, by sliding window."""
        rows = shape.rows
        return {
            window: AttentionMetadata(
                self._tiles.device[:rows],
                self._row_tile.device[:rows],
                kind.items.device[: shape.items],
                kind.spans.device[:rows],
                kind.first.device[:rows],
                kind.masks.device[:rows],
                self._tables.device,
                shape.tile_rows,
            )
            for window, kind in self._kinds.items()
        }

    def _fill_tables(self, rows: Sequence[PackedRows]) -> dict[int, int]:
        """Writes the sessions' block tables; returns the offset of each, by `id` of its rows."""
        starts = {}
        self._filled = 0
        for each in rows:
            starts[id(each)] = self._filled
            blocks = each.table.blocks
            self._tables.host[self._filled : self._filled + len(blocks)] = blocks
            self._filled += len(blocks)
        return starts
