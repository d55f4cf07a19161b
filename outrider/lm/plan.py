"""The plan of one packed pass: its rows, their positions, the slots they write and the slots they see.

A pass holds the rows of several sessions one after another. The plan is worked out once per pass and shared
by all layers: positions, slots to write, and for each sliding window the views and additive masks that
attention needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm import transfer
from outrider.lm.kv.pool import Run, SlotPool
from outrider.lm.kv.table import SlotTable
from speculative.contrast import Contrast
from speculative.digest import RowAsk

_ADDED = np.array([-np.inf, 0], dtype=np.float32)
"""What is added to the score of a node that a row may not see, and of one that it may."""


class SequenceRows(NamedTuple):
    """The rows of one session in a pass, as the engine schedules them."""

    table: SlotTable
    """Slot table of the session."""
    tokens: Sequence[int]
    """Token id of each row."""
    parents: Sequence[int]
    """Parent node of each row. Nodes kept from earlier passes come first, then the rows of this pass; -1 is
    the last committed position. A parent precedes its child."""
    want: Sequence[int]
    """Rows (indices into ``tokens``) whose logits are needed."""
    asks: Callable[[], Sequence[RowAsk]] | None = None
    """What the host will ask of each wanted row, one RowAsk for each; None: greedy. Called where a device
    makes the digests, never where host and device share the memory."""
    contrast: Contrast | None = None
    """How the wanted rows are contrasted with an amateur's, see `outrider.lm.contrast`; None: not at all."""


@dataclass(frozen=True, slots=True)
class AttentionView:
    """The keys and values over which one session's rows attend, in layers of one sliding window."""

    low: int
    """First row of the session in the pass."""
    high: int
    """Row behind the session's last."""
    views: Sequence[torch.Tensor]
    """Keys of a layer at ``2 * layer``, its values at the next index: ``[1, heads, slots, width]``."""
    mask: torch.Tensor | None
    """Additive mask ``[rows, slots]``; None: every row sees every slot, or the triangle of ``causal``."""
    causal: bool
    """Whether the mask is the plain causal triangle."""
    repeated: dict[int, torch.Tensor] = field(default_factory=dict)
    """Repeated masks by number of query heads per key head; see `mask_for`."""

    def mask_for(self, groups: int) -> torch.Tensor | None:
        """The mask for ``groups`` query heads laid under each other, ``[groups * rows, slots]``, or None."""
        if self.mask is None:
            return None
        found = self.repeated.get(groups)
        if found is None:
            found = self.repeated[groups] = self.mask.repeat(groups, 1)
        return found


class PackedRows:
    """The rows of one session in a planned pass: their depths, positions and ancestors."""

    __slots__ = ("depths", "high", "is_chain", "low", "parents", "positions", "table")

    def __init__(self, sequence: SequenceRows, low: int) -> None:
        """``low`` is the session's first row in the pass. Raises ValueError for a parent out of order."""
        table = sequence.table
        self.table = table
        self.low = low
        self.high = low + len(sequence.tokens)
        kept = table.nodes
        self.parents = [*table.parents, *sequence.parents]
        depths = list(table.depths)
        for node in range(kept, len(self.parents)):
            parent = self.parents[node]
            if not -1 <= parent < node:
                raise ValueError(f"row {node - kept} has parent {parent}; a parent is -1 or a node before it")
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.depths = depths
        self.is_chain = depths == list(range(len(depths)))
        self.positions = [table.length + depth for depth in depths[kept:]]

    def ancestor_bytes(self, width: int, since: int = 0) -> bytes:
        """Which nodes from ``since`` on each row may see (ancestors and itself), ``width`` bytes a row.

        Bit ``j % 8`` of a row's byte ``j // 8`` is node ``since + j``; ``width`` bytes hold all of them.
        """
        # Python's integers are bit sets of any size, and far cheaper here than a row of an array per node.
        seen = [0] * since
        for node, parent in enumerate(self.parents[since:]):
            own = 1 << node
            seen.append(seen[parent] | own if parent >= 0 else own)
        return b"".join([bits.to_bytes(width, "little") for bits in seen[self.table.nodes :]])

    def ancestor_bits(self, width: int, since: int = 0) -> NDArray[np.uint8]:
        """`ancestor_bytes` as an array, uint8 ``[rows, width]``."""
        packed = self.ancestor_bytes(width, since)
        return np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)

    def ancestors(self) -> NDArray[np.uint8]:
        """Which nodes each row may see (its ancestors and itself): 1 or 0, uint8 ``[rows, nodes]``."""
        nodes = len(self.parents)
        bits = self.ancestor_bits(-(-nodes // 8))
        return np.unpackbits(bits, axis=1, count=nodes, bitorder="little")


class PassPlan:
    """Rows, positions, slots and masks of one pass over ``sequences``.

    Building a plan reserves the slots that the pass writes, and raises Overloaded before it changes anything.
    """

    def __init__(self, sequences: Sequence[SequenceRows], pool: SlotPool, mask_dtype: torch.dtype) -> None:
        self._pool = pool
        self._mask_dtype = mask_dtype
        self.rows: list[PackedRows] = []
        low = 0
        for sequence in sequences:
            rows = PackedRows(sequence, low)
            self.rows.append(rows)
            low = rows.high
        self.row_count = low
        for rows in self.rows:
            table = rows.table
            table.reserve(table.length + len(rows.parents))
        self._visible: dict[int | None, list[AttentionView]] = {}

    def check(self, sequences: Sequence[SequenceRows], known_ids: int, max_length: int) -> None:
        """Raises ValueError for sequences, those of the plan, that contradict themselves or the model."""
        seen = set()
        for sequence, rows in zip(sequences, self.rows, strict=True):
            count = len(sequence.tokens)
            if not count or len(sequence.parents) != count:
                raise ValueError(f"a sequence has {count} tokens and {len(sequence.parents)} parents")
            if id(sequence.table) in seen:
                raise ValueError("a table appears twice in one pass")
            seen.add(id(sequence.table))
            if min(sequence.tokens) < 0 or max(sequence.tokens) >= known_ids:
                raise ValueError(f"a token is outside the vocabulary of {known_ids}")
            if sequence.want and not 0 <= min(sequence.want) <= max(sequence.want) < count:
                raise ValueError(f"a wanted row is not one of the {count} rows")
            if max(rows.positions) >= max_length:
                raise ValueError(f"position {max(rows.positions)} is past the model's {max_length}")

    def positions(self) -> list[int]:
        """Absolute position of every row, in order of rows."""
        return [position for rows in self.rows for position in rows.positions]

    @staticmethod
    def ids(sequences: Sequence[SequenceRows]) -> list[int]:
        """Token id of every row, in order of rows."""
        return [token for sequence in sequences for token in sequence.tokens]

    def wanted(self, sequences: Sequence[SequenceRows]) -> list[int]:
        """Wanted rows of the whole pass, in order of ``sequences``, from which the plan was made."""
        return [
            rows.low + row
            for rows, sequence in zip(self.rows, sequences, strict=True)
            for row in sequence.want
        ]

    def keep_nodes(self) -> None:
        """Makes the pass's rows nodes of their tables; call it once the pass was computed."""
        for rows in self.rows:
            rows.table.parents = rows.parents
            rows.table.depths = rows.depths

    def written(self) -> list[Run]:
        """The slots that the pass writes, in order of rows."""
        runs = []
        for rows in self.rows:
            first = rows.table.length
            runs += rows.table.runs(first + rows.table.nodes, first + len(rows.parents))
        return runs

    def visible(self, window: int | None) -> list[AttentionView]:
        """Slots that the rows of each session see in layers with this sliding window (None: no window)."""
        found = self._visible.get(window)
        if found is None:
            found = self._visible[window] = [self._see(rows, window) for rows in self.rows]
        return found

    def _see(self, rows: PackedRows, window: int | None) -> AttentionView:
        table = rows.table
        total = table.length + len(rows.parents)
        first = 0
        if window is not None:
            first = max(0, min(rows.positions) + 1 - window)
            if max(rows.positions) < window:
                window = None
        views = self._pool.seen(table.runs(first, total))
        count = rows.high - rows.low
        if rows.is_chain and (count == 1 or (count == total and window is None)):
            return AttentionView(rows.low, rows.high, views, None, causal=count > 1)
        mask = torch.from_numpy(_additive_mask(rows, first, total, window)).to(self._mask_dtype)
        there = transfer.sent(mask, self._pool.layout.device)
        return AttentionView(rows.low, rows.high, views, there, causal=False)


def _additive_mask(rows: PackedRows, first: int, total: int, window: int | None) -> NDArray[np.float32]:
    """Additive mask, float32 ``[rows, total - first]``: 0 where a row may see a slot, else -inf.

    Ancestry and position decide. At least one slot is hidden from a row: no other pass gets here.
    """
    table = rows.table
    # Committed slots are seen by all rows, but for the window; only the nodes' columns need a look.
    nodes = max(first, table.length)
    mask = np.zeros((rows.high - rows.low, total - first), dtype=np.float32)
    mask[:, nodes - first :] = _ADDED[rows.ancestors()[:, nodes - table.length :]]
    if window is not None:
        slots = np.arange(total)
        slots[table.length :] = table.length + np.asarray(rows.depths)
        mask[slots[None, first:] <= np.asarray(rows.positions)[:, None] - window] = -np.inf
    return mask


def rows_asked(sequences: Sequence[SequenceRows]) -> list[RowAsk]:
    """What the host asks of each wanted row of a pass."""
    asked: list[RowAsk] = []
    for sequence in sequences:
        rows = len(sequence.want)
        asks = [RowAsk()] * rows if sequence.asks is None else sequence.asks()
        if len(asks) != rows:
            raise ValueError(f"a sequence wants {rows} rows and asks of {len(asks)}")
        asked += asks
    return asked


def kept_rows(wanted: list[int], rows: int, device: torch.device) -> int | torch.Tensor:
    """The wanted rows as a model takes them: a number where they are the last of its rows, else indices."""
    count = len(wanted)
    if count and wanted == list(range(rows - count, rows)):
        return count
    return transfer.indices([wanted], device)[0]
