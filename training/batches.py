"""Training windows as a pure function of the step, so that a resumed run reads the same windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Unsigned = TypeVar("Unsigned", bound="np.unsignedinteger[Any]")


@dataclass(frozen=True)
class Batches:
    """Windows of a packed corpus (`ids`: uint16, (tokens,)), cut and shuffled differently in every epoch."""

    ids: npt.NDArray[np.uint16]
    window: int
    batch: int
    seed: int

    def at(self, step: int) -> torch.Tensor:
        """The batch of `step`: int64, shape (batch, window + 1); the last column is only ever predicted."""
        per_epoch = max(1, (len(self.ids) - 1) // self.window - 1) // self.batch
        epoch, index = divmod(step, per_epoch)
        rng = np.random.default_rng((self.seed, self.window, epoch))
        offset = int(rng.integers(self.window))
        order = rng.permutation((len(self.ids) - 1 - offset) // self.window)
        chosen = order[index * self.batch : (index + 1) * self.batch] * self.window + offset
        rows = [self.ids[start : start + self.window + 1] for start in chosen]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def shuffled(rows: int, batch: int, seed: int, step: int) -> npt.NDArray[np.int64]:
    """Indices of the batch of `step` among `rows` rows, shuffled anew in every epoch."""
    epoch, index = divmod(step, max(1, rows // batch))
    order: npt.NDArray[np.int64] = np.random.default_rng((seed, epoch)).permutation(rows)
    return order[index * batch : (index + 1) * batch]


def scattered(ids: npt.NDArray[Unsigned], rows: int, window: int, seed: int) -> npt.NDArray[Unsigned]:
    """`rows` windows that begin anywhere in `ids`: shape (rows, window), the same dtype."""
    starts = np.random.default_rng((seed, window)).integers(len(ids) - window, size=rows)
    return np.stack([ids[start : start + window] for start in starts])
