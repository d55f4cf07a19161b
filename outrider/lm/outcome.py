"""What a pass returns: an object that stays where the model is and gives the host what the host asks for.

A pass wants logits of some of its rows. Choosing a token seldom needs a whole row, so an outcome hands out
digests (`speculative.digest`), and copies a row only where a digest does not suffice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from speculative.digest import HostDigest, RowDigest

MOST_TOP = 32
"""Largest number of likeliest tokens that a pass gives for each wanted row."""


@dataclass(frozen=True, slots=True)
class OutcomeWants:
    """What a model's passes give beside the digests of wanted rows. Set once, before the first pass."""

    top: int = 0
    """Number of likeliest tokens of each wanted row, up to MOST_TOP."""
    features: Sequence[int] = ()
    """Layers whose hidden states are kept: 0 is the first layer's output, -1 the output of the last norm."""


@dataclass(slots=True)
class TransferCounts:
    """What a model's outcomes have copied from the device to the host. Zero where both share the memory."""

    planned_bytes: int = 0
    """Bytes of planned transfers: one for each pass from which rows are wanted."""
    fetched_rows: int = 0
    """Whole rows of logits copied because a digest did not suffice."""
    fetched_bytes: int = 0
    """Bytes of these rows."""


class Outcome(Protocol):
    """The outcome of a pass. Wanted rows count from 0, in order of the sequences and of their `want`.

    Valid until the next pass of the same model.
    """

    features: torch.Tensor | None
    """Hidden states of every row of the pass, ``[layers, rows, width]``, in the model's dtype and on its
    device; None where no layer's are kept."""

    def __len__(self) -> int:
        """Number of wanted rows."""
        ...

    def digest(self, index: int) -> RowDigest:
        """What of one wanted row suffices to choose its token."""
        ...

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one wanted row, float32[V]; read-only. Copied from the device on demand."""
        ...

    def rows(self) -> NDArray[np.float32]:
        """Logits of all wanted rows, float32[n, V]; for checks and benchmarks."""
        ...

    def top(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logits of the ``count`` likeliest tokens of each wanted row, best first: ``[n, count]``.

        Of equals, the lowest ids. Rows of fewer than ``count`` finite logits end in ids of -1.
        """
        ...


class HostOutcome:
    """An Outcome over logits in the host's memory. Nothing is computed or copied before it is asked for."""

    def __init__(self, logits: torch.Tensor, features: torch.Tensor | None = None) -> None:
        """``logits`` are ``[n, V]`` on the CPU, in the model's dtype."""
        self._logits = logits
        # One view of all rows: indexing a tensor row by row takes longer than most digests.
        self._floats: NDArray[np.float32] | None = logits.numpy() if logits.dtype == torch.float32 else None
        # Asking a tensor for the address of a row takes longer as well.
        is_packed = self._floats is not None and logits.is_contiguous()
        self._address, self._row_bytes = (logits.data_ptr(), 4 * logits.shape[1]) if is_packed else (0, 0)
        self.features = features

    def __len__(self) -> int:
        return len(self._logits)

    def digest(self, index: int) -> HostDigest:
        """What of one wanted row suffices to choose its token, computed as it is asked for."""
        return HostDigest(self.row(index), self._address + index * self._row_bytes)

    def row(self, index: int) -> NDArray[np.float32]:
        """Logits of one wanted row, float32[V]: a view of the model's own where that computes in float32."""
        floats = self._floats
        found: NDArray[np.float32] = self._logits[index].float().numpy() if floats is None else floats[index]
        return found

    def rows(self) -> NDArray[np.float32]:
        """Logits of all wanted rows, float32[n, V]: a view of the model's own where that is float32."""
        found: NDArray[np.float32] = self._logits.float().numpy()
        return found

    def top(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logits of the ``count`` likeliest tokens of each wanted row, best first."""
        ids = np.full((len(self), count), -1, np.int32)
        logits = np.full((len(self), count), -np.inf, np.float32)
        for index in range(len(self) if count else 0):
            row = self.row(index)
            best = _likeliest(row, count)
            ids[index, : len(best)] = best
            logits[index, : len(best)] = row[best]
        return ids, logits


def _likeliest(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the ``count`` highest finite logits, highest first and of equals the lowest id."""
    level = np.partition(row, -count)[-count] if count < len(row) else -np.inf
    # A level of NaN, from a broken row, excludes nothing.
    among = np.flatnonzero(~(row < level) & np.isfinite(row))
    return among[np.argsort(-row[among], kind="stable")[:count]]
