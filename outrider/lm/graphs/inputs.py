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
from outrider.lm.attention.metadata import MOST_BRANCHING, WORDS, AttentionMetadata
from outrider.lm.attention.partition import RowTiles, branch_masks, cut, items_of, trunk_of
from outrider.lm.attention.shapes import GraphShape
from outrider.lm.plan import PassPlan

_MOST_TAIL = 2**24
"""Largest size of block tables and slot copies together, in bytes."""


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

    def __init__(self, memory: _Memory, rows: int) -> None:
        self.items = memory.take(torch.int32, items_of(rows), 3)
        self.spans = memory.take(torch.int32, rows, 2)
        self.first = memory.take(torch.int32, rows)
        self.masks = memory.take(torch.int32, rows, WORDS)


class GraphInputs:
    """Inputs of a step: ids, positions, slots, attention metadata, and the slots to copy before the step.

    Args:
        rows: largest number of rows of a step.
        windows: sliding windows of the layers that have one, in positions.
        blocks: largest number of blocks that all sessions of a step may have together.
        device: device on which steps run.
    """

    def __init__(self, rows: int, windows: Sequence[int], blocks: int, device: torch.device) -> None:
        tail = min(_MOST_TAIL, 4 * blocks + 2**16)
        kinds: list[int | None] = [None, *windows]
        head = 8 * 4 * rows + 4 * 6 * rows + 4 * 3 * len(kinds) * items_of(rows)
        head += len(kinds) * 4 * rows * (2 + 1 + WORDS) + 16 * (7 + 4 * len(kinds))
        memory = _Memory(head + tail, device)
        self._memory = memory
        self._rows = rows
        self.ids = memory.take(torch.int64, rows)
        self.positions = memory.take(torch.int64, rows)
        self.slots = memory.take(torch.int64, rows)
        self.wanted = memory.take(torch.int64, rows)
        self._tiles = memory.take(torch.int32, rows, 4)
        self._row_tile = memory.take(torch.int32, rows)
        self._upto = memory.take(torch.int32, rows)
        self._kinds = {window: _Kind(memory, rows) for window in kinds}
        self._head = memory.used
        self._tables = memory.take(torch.int32, tail // 4)
        self._copies = _Field(
            self._tables.host[: tail // 8 * 2].view(np.int64),
            self._tables.device[: tail // 8 * 2].view(torch.int64),
        )

    def add_asks(self, words: int) -> None:
        """Makes room for the asks of wanted rows, ``words`` int64 words each; digests are made from them."""
        device = self._memory.device.device
        self._ask_memory = _Memory(8 * words * self._rows, device)
        self.asks = self._ask_memory.take(torch.int64, self._rows, words)
        # Padding rows are digested too, and what they name has to exist.
        self._ask_memory.host.zero_()
        self._ask_memory.device.zero_()

    def send_asks(self, words: NDArray[np.int64]) -> None:
        """Sends the asks of a pass's wanted rows, int64 ``[n, words]``, in a copy of their own."""
        self.asks.host[: len(words)] = words
        transfer.upload(self._ask_memory.host, self._ask_memory.device, words.nbytes)

    def fits(self, plan: PassPlan, copies: int) -> bool:
        """Whether the fields have room for the pass of this plan and for ``copies`` slots to copy."""
        if plan.row_count > self._rows:
            return False
        if max(len(rows.parents) - trunk_of(rows) for rows in plan.rows) > MOST_BRANCHING:
            return False
        blocks = sum(len(rows.table.blocks) for rows in plan.rows)
        return 4 * (blocks + 2) + 16 * copies <= 4 * len(self._tables.host)

    def fill(
        self, plan: PassPlan, shape: GraphShape, ids: Sequence[int], wanted: Sequence[int], scratch: int
    ) -> None:
        """Writes the inputs of a pass; padding rows write to the slot ``scratch`` and see no slot."""
        positions = np.array(plan.positions())
        written = [np.arange(low, high) for low, high in plan.written()]
        slots = written[0] if len(written) == 1 else np.concatenate(written)
        for field, values, rest in (
            (self.ids, ids, 0),
            (self.positions, positions, 0),
            (self.slots, slots, scratch),
            (self.wanted, wanted, 0),
        ):
            field.host[: len(values)] = values
            field.host[len(values) : shape.rows] = rest
        tiles = RowTiles.of(plan.rows, shape.tile_rows)
        self._fill_tiles(tiles, self._fill_tables(plan), shape)
        for window, kind in self._kinds.items():
            first = np.zeros_like(positions) if window is None else np.maximum(positions + 1 - window, 0)
            kind.first.host[: len(first)] = first
            items, spans = cut(*tiles.spans(first))
            kind.items.host[: len(items)] = items
            kind.items.host[len(items) : shape.items] = 0
            kind.spans.host[: len(spans)] = spans
            kind.spans.host[len(spans) : shape.rows] = 0
            kind.masks.host[: len(first)] = 0
            for rows, base in zip(plan.rows, tiles.base.tolist(), strict=True):
                trunk = base - rows.table.length
                if trunk < len(rows.parents):
                    kind.masks.host[rows.low : rows.high] = branch_masks(rows, trunk, window)

    def fill_padding(self, shape: GraphShape, scratch: int) -> None:
        """Writes and sends the inputs of a step of padding rows alone."""
        for field, value in ((self.ids, 0), (self.positions, 0), (self.slots, scratch), (self.wanted, 0)):
            field.host[: shape.rows] = value
        self._row_tile.host[: shape.rows] = -1
        for kind in self._kinds.values():
            kind.items.host[: shape.items] = 0
            kind.spans.host[: shape.rows] = 0
        self._filled = 0
        self.send({})

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
                self._upto.device[:rows],
                kind.first.device[:rows],
                kind.masks.device[:rows],
                self._tables.device,
                shape.tile_rows,
            )
            for window, kind in self._kinds.items()
        }

    def _fill_tiles(self, tiles: RowTiles, tables: NDArray[np.int64], shape: GraphShape) -> None:
        """Writes what the kernels of all windows read; ``tables`` is the offset of each session's blocks."""
        count = len(tiles.low)
        self._tiles.host[:count, 0] = tiles.low
        self._tiles.host[:count, 1] = tiles.high - tiles.low
        self._tiles.host[:count, 2] = tables[tiles.of_tile]
        self._tiles.host[:count, 3] = tiles.base[tiles.of_tile]
        self._upto.host[: len(tiles.upto)] = tiles.upto
        self._row_tile.host[: len(tiles.upto)] = tiles.row_tile()
        self._row_tile.host[len(tiles.upto) : shape.rows] = -1

    def _fill_tables(self, plan: PassPlan) -> NDArray[np.int64]:
        """Writes the sessions' block tables; returns the offset of each."""
        words = [np.frombuffer(rows.table.block_words, np.int32) for rows in plan.rows]
        ends = np.cumsum([len(each) for each in words])
        self._filled = int(ends[-1])
        np.concatenate(words, out=self._tables.host[: self._filled])
        return ends - [len(each) for each in words]
