"""Hidden states that a proposer's layers continue: those of each session's last computed position.

A proposer's layer pairs each token with the hidden state of the position before it. To go on with a session
therefore takes the hidden state of its last computed position: where a prompt goes on in the next pass, where
a session begins with cached blocks, and where the proposer drafts.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.lm import transfer
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import Run, SlotPool
from verifier_service.proposers.planes.proposer_planes import slots_of_runs


class RowsKept(NamedTuple):
    """Rows of a pass that are committed positions of one session now."""

    handle: int
    first: int
    """Position of the first row."""
    rows: tuple[int, ...]
    """Row of the pass, for each position."""
    runs: tuple[Run, ...]
    """Runs of slots of these positions."""


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
        self._last: dict[int, tuple[int, Tensor]] = {}

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self._last)

    def at(self, handle: int, position: int) -> Tensor | None:
        """Hidden states of a session's last computed position, [layers, width]; None: that is another."""
        known, features = self._last.get(handle, (-1, None))
        return features if known == position else None

    def begin(self, handle: int, position: int, block: int) -> None:
        """Notes that a session begins behind the end of a cached block, whose last position is `position`."""
        self._last[handle] = position, self._pool.tail(block).view(self._layers, -1).clone()

    def keep(self, kept: Sequence[RowsKept], features: Tensor) -> None:
        """Keeps what the next pass needs of `features`, [layers, rows, width], which go with this pass."""
        ends, blocks, handles = [], [], []
        for entry in kept:
            behind = entry.first + len(entry.rows)
            handles.append((entry.handle, behind - 1, entry.rows[-1]))
            if behind // BLOCK > entry.first // BLOCK:
                slots = slots_of_runs(entry.runs)
                for at in range(BLOCK - 1 - entry.first % BLOCK, len(entry.rows), BLOCK):
                    ends.append(entry.rows[at])
                    blocks.append(slots[at] // BLOCK)
        found = selected(features, [row for *_, row in handles] + ends)
        if found.dtype != self._pool.layout.dtype:
            found = found.to(self._pool.layout.dtype)
        for (handle, position, _), last in zip(handles, found.unbind(1), strict=False):
            self._last[handle] = position, last
        if blocks:
            self._pool.write_tails(blocks, found[:, len(handles) :].transpose(0, 1).flatten(1))

    def keep_only(self, handles: Container[int]) -> None:
        """Forgets the sessions that are not among these handles."""
        self._last = {handle: last for handle, last in self._last.items() if handle in handles}


def selected(features: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of some rows of hidden states, [layers, rows, width]."""
    if len(rows) == 1:  # the usual step of a single session; an index takes three times as long
        return features.narrow(1, rows[0], 1).clone()
    (there,) = transfer.indices([list(rows)], features.device)
    return features.index_select(1, there)
