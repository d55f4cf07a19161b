"""Keys and values of a batched proposer's own layers, in planes of the target's pool, and what they need.

A proposer's layer pairs each token with the hidden state of the position before it. To go on with a
session therefore takes the hidden state of its last computed position: where a prompt goes on in the next
pass, where a session begins with cached blocks, and where the proposer drafts. `LastFeatures` keeps these.
"""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.lm import transfer
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import Run, SlotPool


class ProposerPlanes:
    """The planes of one proposer in the target's pool.

    Args:
        pool: the target's.
        first: index of the proposer's first plane among the pool's.
        count: number of the proposer's planes.
    """

    def __init__(self, pool: SlotPool, first: int, count: int) -> None:
        self._pool = pool
        self._first = first
        self._count = count

    @torch.inference_mode()
    def write(self, runs: Iterable[Run], values: Sequence[Tensor]) -> None:
        """Stores rows in the slots of these runs.

        Args:
            runs: runs of slots, in order of the rows; those of several sessions may follow each other.
            values: one tensor per plane, [heads, rows, width].
        """
        (slots,) = transfer.indices([_slots(runs)], self._pool.layout.device)
        for plane, rows in zip(self._own(), values, strict=True):
            plane.index_copy_(1, slots, rows.to(plane.dtype))

    def read(self, runs: Sequence[Run]) -> list[Tensor]:
        """The rows in the slots of these runs, one tensor per plane, [heads, rows, width].

        There is at least one run; a single one gives views, which are valid until the next pass.
        """
        parts = [[plane[:, low:high] for low, high in runs] for plane in self._own()]
        return [found[0] if len(found) == 1 else torch.cat(found, 1) for found in parts]

    def _own(self) -> Sequence[Tensor]:
        # Asked for each time: the pool moves its planes when it grows.
        return self._pool.planes()[self._first : self._first + self._count]


class RowsKept(NamedTuple):
    """Rows of a pass that are committed positions of one session now."""

    handle: int
    first: int
    """Position of the first row."""
    rows: tuple[int, ...]
    """Row of the pass, for each position."""
    runs: tuple[Run, ...]
    """Runs of slots of these positions."""


MOST_HELD = 64
"""Rows of the largest pass whose features are held as they are instead of a copy of the rows that matter."""


def may_hold(features: Tensor) -> bool:
    """Whether features may be held beyond the next pass, which costs no call of torch.

    In each such call another thread may take the interpreter. On a CPU every pass makes features of its own;
    elsewhere the next pass may write into the same memory.
    """
    return features.device.type == "cpu" and features.shape[1] <= MOST_HELD


class _Kept(NamedTuple):
    """Where the hidden states of a session's last computed position are."""

    position: int
    features: Tensor
    """``[layers, rows, width]``."""
    row: int


class LastFeatures:
    """Hidden states of each session's last computed position, and of the last position of each block.

    The latter lie beside the block in the pool, so a session that begins with the block finds them. All are
    in the pool's dtype.

    Args:
        pool: the target's, with room for them.
        layers: number of layers whose hidden states a pass keeps.
    """

    def __init__(self, pool: SlotPool, layers: int) -> None:
        self._pool = pool
        self._layers = layers
        self._last: dict[int, _Kept] = {}

    def has(self, handle: int, position: int) -> bool:
        """Whether this is the session's last computed position."""
        kept = self._last.get(handle)
        return kept is not None and kept.position == position

    def at(self, handle: int, position: int) -> Tensor | None:
        """Hidden states of a session's last computed position, [layers, width]; None: that is another."""
        kept = self._last.get(handle)
        if kept is None or kept.position != position:
            return None
        found = kept.features[:, kept.row]
        return found if found.dtype == self._pool.layout.dtype else found.to(self._pool.layout.dtype)

    def begin(self, handle: int, position: int, block: int) -> None:
        """Notes that a session begins behind the end of a cached block, whose last position is `position`."""
        tail = self._pool.tail(block).view(self._layers, 1, -1).clone()
        self._last[handle] = _Kept(position, tail, 0)

    def keep(self, kept: Sequence[RowsKept], features: Tensor) -> None:
        """Keeps what the next pass needs of `features`, [layers, rows, width], which go with this pass."""
        ends, blocks = [], []
        for entry in kept:
            slots = _slots(entry.runs)
            for at, row in enumerate(entry.rows):
                if (entry.first + at + 1) % BLOCK == 0:
                    ends.append(row)
                    blocks.append(slots[at] // BLOCK)
        last = [entry.rows[-1] for entry in kept]
        held = features if may_hold(features) else _picked(features, last)
        for at, entry in enumerate(kept):
            row = entry.rows[-1] if held is features else at
            self._last[entry.handle] = _Kept(entry.first + len(entry.rows) - 1, held, row)
        if blocks:
            tails = _picked(features, ends).to(self._pool.layout.dtype)
            self._pool.write_tails(blocks, tails.transpose(0, 1).flatten(1))

    def keep_only(self, handles: Container[int]) -> None:
        """Forgets the sessions that are not among these handles."""
        self._last = {handle: last for handle, last in self._last.items() if handle in handles}


def _picked(features: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows, ``[layers, len(rows), width]``."""
    (there,) = transfer.indices([rows], features.device)
    return features.index_select(1, there)


def _slots(runs: Iterable[Run]) -> list[int]:
    return [slot for low, high in runs for slot in range(low, high)]
