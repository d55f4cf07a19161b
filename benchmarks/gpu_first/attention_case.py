"""Random attention of one step: slots of several sessions in blocks that lie apart, and rows over them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.lm.attention.interface import AttentionParams
from outrider.lm.attention.metadata import Attend, AttentionMetadata
from outrider.lm.attention.shapes import BUCKETS, graph_shape
from outrider.lm.graphs.inputs import GraphInputs
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.int8_plane import storage_of
from outrider.lm.kv.pool import KVLayout, SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import PassPlan, SequenceRows

_MOST_BRANCHES = 200


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads and widths of one layer, and what is special about its attention."""

    heads: int = 32
    key_heads: int = 8
    width: int = 128
    value_width: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    int8: bool = False
    """Whether slots hold int8."""


class AttentionCase:
    """One layer's random keys and values on a device, and a step of random queries over them.

    Slots that no row may see hold NaN.

    Args:
        heads: heads and widths.
        trees: committed tokens, kept nodes and rows of each session.
        dtype: dtype of queries, keys and values.
        device: device on which they lie.
        seed: seed of contents, trees and places of blocks.
        apart: whether a session's blocks lie apart from one another.
    """

    def __init__(
        self,
        heads: Heads,
        trees: tuple[tuple[int, int, int], ...],
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        apart: bool = True,
    ) -> None:
        self.heads, self._dtype, self._device = heads, dtype, torch.device(device)
        self._dice = random.Random(seed)
        self._random = torch.Generator(device=device).manual_seed(seed)
        shapes = ((heads.key_heads, heads.width), (heads.key_heads, heads.value_width))
        room = sum(sum(tree) + 2 * BLOCK for tree in trees)
        slots = 3 * room if apart else room
        self.pool = SlotPool(KVLayout(shapes, dtype, self._device, int8=heads.int8), slots, slots)
        with torch.inference_mode():
            for plane in self.pool.planes():
                storage_of(plane)[1].fill_(float("nan"))
            self.plan = PassPlan([self._session(*tree, apart) for tree in trees], self.pool, dtype)
            for low, high in self.plan.written():
                for plane in self.pool.planes():
                    write(plane, range(low, high), self._draw(plane.shape[0], high - low, plane.shape[2]))
        rows = self.plan.row_count
        windows = () if heads.window is None else (heads.window,)
        blocks = sum(len(each.table.blocks) for each in self.plan.rows)
        inputs = GraphInputs(BUCKETS[-1], windows, blocks + 64, self._device)
        shape = graph_shape(self.plan.rows, 0, heads.heads // heads.key_heads)
        inputs.fill(self.plan, shape, [0] * rows, [], self.pool.scratch)
        inputs.send({})
        self.rows, self.padded_rows = rows, shape.rows
        self.metadata: AttentionMetadata = inputs.metadata(shape)[heads.window]
        self.keys, self.values = self.pool.planes()
        self.query = self._draw(shape.rows, heads.heads, heads.width)
        sinks = self._draw(heads.heads) if heads.sinks else None
        self.params = AttentionParams(None, heads.window, heads.softcap, sinks)

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values that the step's sessions see."""
        slots = sum(each.table.length + len(each.parents) for each in self.plan.rows)
        return slots * self.pool.layout.slot_bytes

    def attend(self, kernel: Attend) -> torch.Tensor:
        """Output of the step's rows by this kernel, padding rows included: ``[rows, heads, value width]``."""
        return kernel(self.query, self.keys, self.values, self.metadata, self.params)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random, device=self._device).to(self._dtype)

    def _session(self, committed: int, kept: int, rows: int, apart: bool) -> SequenceRows:
        # A mask has bits for so many branching nodes; those before them are a chain, as a prompt's are.
        chain = max(0, kept + rows - _MOST_BRANCHES)
        return random_session(
            self.pool, self._dice, self._draw, (committed, kept, rows), chain=chain, apart=apart
        )


def write(plane: torch.Tensor, slots: Sequence[int], rows: torch.Tensor) -> None:
    """Writes rows ``[heads, slots, width]`` to these slots of a plane of floats or of int8."""
    plane.index_copy_(1, torch.tensor(slots, dtype=torch.int64, device=rows.device), rows)


def random_session(
    pool: SlotPool,
    dice: random.Random,
    draw: Callable[..., torch.Tensor],
    tree: tuple[int, int, int],
    *,
    chain: int,
    apart: bool = True,
) -> SequenceRows:
    """A session with random keys and values, whose rows hang in a random tree.

    Args:
        draw: gives random numbers of a shape.
        tree: number of committed positions, of nodes kept from earlier passes, and of rows.
        chain: number of first nodes that hang one below the other; others may hang beside the last of them.
        apart: whether the session's blocks lie apart.
    """
    committed, kept, rows = tree
    table = SlotTable(pool)
    while len(table.blocks) * BLOCK < committed + kept:
        table.reserve(len(table.blocks) * BLOCK + 1)
        if apart:
            pool.take(dice.randrange(1, 3), table.blocks[-1])
    slots = table.slots(0, committed + kept)
    for plane in pool.planes():
        write(plane, slots, draw(plane.shape[0], len(slots), plane.shape[2]))
    table.length = committed
    parents = [
        node - 1 if node < chain else dice.randrange(max(-1, chain - 2, node - 4), node)
        for node in range(kept + rows)
    ]
    for parent in parents[:kept]:
        table.depths.append(table.depths[parent] + 1 if parent >= 0 else 0)
    table.parents = parents[:kept]
    return SequenceRows(table, [0] * rows, parents[kept:], [])
