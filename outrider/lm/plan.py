"""What one packed pass computes: which rows, at which positions, seeing which slots.

A pass is the rows of several sessions one after another. Everything here is worked out once per pass and
shared by all layers: positions, slots to write, and per window kind the views and additive masks that
attention needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.lm import transfer
from outrider.lm.pool import Run, SlotPool
from outrider.lm.table import SlotTable


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one session in a pass.

    ``parents`` index the session's nodes: those kept from earlier passes come first, then the rows of this
    pass; -1 is the last committed position, and a parent precedes its child. ``want`` are the rows (indices
    into ``tokens``) whose logits are needed.
    """

    table: SlotTable
    tokens: Sequence[int]
    parents: Sequence[int]
    want: Sequence[int]


@dataclass(frozen=True, slots=True)
class Visible:
    """What the rows ``[low, high)`` of a pass attend over, in one kind of layer.

    ``views[2 * layer]`` are the keys, the next the values, ``[1, heads, seen, width]``. ``mask`` is additive,
    ``[rows, seen]``, or None where every row sees everything; with ``causal`` the mask is the plain triangle.
    """

    low: int
    high: int
    views: Sequence[torch.Tensor]
    mask: torch.Tensor | None
    causal: bool
    repeated: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask_for(self, groups: int) -> torch.Tensor | None:
        """The mask repeated for ``groups`` query heads laid under each other, ``[groups * rows, seen]``."""
        if self.mask is None:
            return None
        found = self.repeated.get(groups)
        if found is None:
            found = self.repeated[groups] = self.mask.repeat(groups, 1)
        return found


class Rows:
    """The rows of one share: their depths, positions and who is whose ancestor."""

    __slots__ = ("depths", "high", "is_chain", "low", "parents", "positions", "table")

    def __init__(self, share: Share, low: int) -> None:
        """``low`` is the share's first row in the pass. Raises ValueError for a parent out of order."""
        table = share.table
        self.table = table
        self.low = low
        self.high = low + len(share.tokens)
        kept = table.nodes
        self.parents = [*table.parents, *share.parents]
        depths = list(table.depths)
        for node in range(kept, len(self.parents)):
            parent = self.parents[node]
            if not -1 <= parent < node:
                raise ValueError(f"row {node - kept} has parent {parent}; a parent is -1 or a node before it")
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.depths = depths
        self.is_chain = depths == list(range(len(depths)))
        self.positions = [table.length + depth for depth in depths[kept:]]

    def ancestors(self) -> NDArray[np.bool_]:
        """bool ``[rows, nodes]``: may the row see the node (its ancestors and itself)."""
        nodes = len(self.parents)
        seen = np.zeros((nodes, nodes), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] = seen[parent]
            seen[node, node] = True
        return seen[self.table.nodes :]


class PassPlan:
    """Rows, positions, slots and masks of one pass over ``shares``.

    Building it reserves the slots that the pass writes: Overloaded is raised before anything has changed.
    """

    def __init__(self, shares: Sequence[Share], pool: SlotPool, mask_dtype: torch.dtype) -> None:
        self._pool = pool
        self._mask_dtype = mask_dtype
        self.rows: list[Rows] = []
        low = 0
        for share in shares:
            rows = Rows(share, low)
            self.rows.append(rows)
            low = rows.high
        self.row_count = low
        for rows in self.rows:
            table = rows.table
            table.reserve(table.length + len(rows.parents))
        self._visible: dict[int | None, list[Visible]] = {}

    def positions(self) -> list[int]:
        """Absolute position of every row."""
        return [position for rows in self.rows for position in rows.positions]

    def written(self) -> list[Run]:
        """The slots that the rows are written to, in order of rows."""
        runs = []
        for rows in self.rows:
            first = rows.table.length
            runs += rows.table.runs(first + rows.table.nodes, first + len(rows.parents))
        return runs

    def visible(self, window: int | None) -> list[Visible]:
        """Per share what its rows attend over in layers with this sliding window (None: no window)."""
        found = self._visible.get(window)
        if found is None:
            found = self._visible[window] = [self._see(rows, window) for rows in self.rows]
        return found

    def _see(self, rows: Rows, window: int | None) -> Visible:
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
            return Visible(rows.low, rows.high, views, None, causal=count > 1)
        allowed = self._allowed(rows, first, total, window)
        if allowed.all():
            return Visible(rows.low, rows.high, views, None, causal=False)
        mask = torch.zeros(allowed.shape, dtype=self._mask_dtype)
        mask.masked_fill_(torch.from_numpy(~allowed), float("-inf"))
        there = transfer.sent(mask, self._pool.layout.device)
        return Visible(rows.low, rows.high, views, there, causal=False)

    def _allowed(self, rows: Rows, first: int, total: int, window: int | None) -> NDArray[np.bool_]:
        """bool ``[rows, total - first]``: who may see which slot, by ancestry and by position."""
        table = rows.table
        count = rows.high - rows.low
        if rows.is_chain:
            allowed = np.tri(count, total - first, total - first - count, dtype=bool)
        else:
            allowed = np.ones((count, total - first), dtype=bool)
            tree = rows.ancestors()
            if first > table.length:
                allowed[:] = tree[:, first - table.length :]
            else:
                allowed[:, table.length - first :] = tree
        if window is not None:
            slots = np.arange(total)
            slots[table.length :] = table.length + np.asarray(rows.depths)
            allowed &= slots[None, first:] > np.asarray(rows.positions)[:, None] - window
        return allowed
