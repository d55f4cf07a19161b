"""Keys and values of a batched proposer's own layers, in planes of the target's pool."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outrider.lm import transfer
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
        (slots,) = transfer.indices([slots_of_runs(runs)], self._pool.layout.device)
        for plane, rows in zip(self.tensors(), values, strict=True):
            plane.index_copy_(1, slots, rows.to(plane.dtype))

    def read(self, runs: Sequence[Run]) -> list[Tensor]:
        """The rows in the slots of these runs, one tensor per plane, [heads, rows, width].

        There is at least one run; a single one gives views, which are valid until the next pass.
        """
        parts = [[plane[:, low:high] for low, high in runs] for plane in self.tensors()]
        return [found[0] if len(found) == 1 else torch.cat(found, 1) for found in parts]

    def tensors(self) -> Sequence[Tensor]:
        """The planes, [heads, slots, width] each; ask anew for each pass: a pool that grows moves them."""
        return self._pool.planes()[self._first : self._first + self._count]


def slots_of_runs(runs: Iterable[Run]) -> list[int]:
    """All slots of these runs, in order."""
    return [slot for low, high in runs for slot in range(low, high)]
