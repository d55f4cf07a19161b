"""Keys or values of one layer in int8: each row of each head has a scale of its own.

A row's numbers are its largest one in size over 127, times whole numbers from -127 to 127. So what a slot
holds depends on the row that was written alone, never on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

SCALE_BYTES = 4
"""Size of a row's scale, a float32."""
MOST_CODE = 127
"""The largest whole number of a row."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The scale of a row of zeros; any smaller one would divide by zero."""


@dataclass(frozen=True, slots=True)
class Int8Plane:
    """Slots of a plane as whole numbers and scales; rows come and go as floats.

    Writes take the arguments of a tensor's own methods, since passes write to tensors and planes alike.
    """

    codes: torch.Tensor
    """int8 ``[..., heads, slots, width]``."""
    scales: torch.Tensor
    """float32 ``[..., heads, slots, 1]``."""
    dtype: torch.dtype
    """dtype of the rows that are read."""

    @property
    def shape(self) -> torch.Size:
        """``[..., heads, slots, width]``."""
        return self.codes.shape

    def copy_(self, rows: torch.Tensor) -> None:
        """Writes a row to every slot."""
        codes, scales = quantise(rows)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def index_copy_(self, dim: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows to these slots; ``dim`` is that of the slots."""
        codes, scales = quantise(rows)
        self.codes.index_copy_(dim, slots, codes)
        self.scales.index_copy_(dim, slots, scales)

    def index_select(self, dim: int, slots: torch.Tensor) -> torch.Tensor:
        """The rows in these slots; ``dim`` is that of the slots."""
        return self._floats(self.codes.index_select(dim, slots), self.scales.index_select(dim, slots))

    def floats(self) -> torch.Tensor:
        """The rows of all slots."""
        return self._floats(self.codes, self.scales)

    def as_tensor(self) -> torch.Tensor:
        """This plane typed as a tensor, for callers that only write or select rows."""
        return cast(torch.Tensor, self)

    def _floats(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (codes * scales).to(self.dtype)


class DequantisedPlanes(Sequence[torch.Tensor]):
    """Planes as they are read: a layer's floats are made when the layer, which has written, asks for them."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = planes

    def __len__(self) -> int:
        return len(self._planes)

    def __getitem__(self, plane: Any) -> Any:
        found: Any = self._planes[plane]
        return found.floats() if isinstance(found, Int8Plane) else found


def storage_of(plane: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel reads of a plane: codes and scales; of floats, which have no scales, the plane twice."""
    found: Any = plane
    return (found.codes, found.scales) if isinstance(found, Int8Plane) else (plane, plane)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[..., width]`` as int8 of the same shape, and their scales, float32 ``[..., 1]``."""
    floats = rows.float()
    # A GPU multiplies by the reciprocal of a plain number, which is another number now and then.
    most = floats.new_full((), MOST_CODE)
    scales = (floats.abs().amax(-1, keepdim=True) / most).clamp_(min=LEAST_SCALE)
    return (floats / scales).round_().clamp_(-MOST_CODE, MOST_CODE).to(torch.int8), scales
