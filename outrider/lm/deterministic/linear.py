"""Linear layers whose rows have the same bits whatever rows share the pass, for the deterministic profile.

A product of floats depends on the order in which its terms are added, and libraries choose that order by the
shape of the call. So rows are multiplied in tiles of few fixed sizes. When a layer is laid out, random rows
show which sizes give the very bits of the tile of eight at every place; only those sizes are used. The result
holds for all rows, because the order of additions in a call of one shape does not depend on the numbers.
Knows nothing about the meaning of layers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.functional import linear, pad

from outrider.lm.linear import Held, stacked_bias, stacked_weight

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Possible numbers of rows in a tile, ascending."""

REFERENCE = 8
"""Number of rows in the tile whose bits count; fewer rows are padded to a tile."""

_HALF_NUMBERS = 2**19
"""Least number of products in half precision that are compared before two sizes of tiles count as equal."""

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies the rows of one tile by a layer's weights, in one call of the library."""


class UnsteadyProduct(Exception):
    """A row's product depends on its place among the rows of the reference tile."""


class TiledProducts:
    """Makes the tiled products of one model; tests each shape of weights once."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int, bool], tuple[int, ...]] = {}

    def __call__(self, layers: list[nn.Linear]) -> "TiledProduct":
        """Makes the product of layers that read one input. Raises UnsteadyProduct."""
        product = TiledProduct(layers)
        key = (product.out_features, product.in_features, product.bias is not None)
        if key not in self._sizes:
            self._sizes[key] = steady_sizes(product.multiply, product.example())
        product.sizes = self._sizes[key]
        return product


class TiledProduct:
    """The stacked weights of layers with one input, multiplied by tiles. A `linear.Product`."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        weight = stacked_weight(layers)
        self.out_features, self.in_features = weight.shape
        self.bias = stacked_bias(layers)
        self.sizes: tuple[int, ...] = (REFERENCE,)
        """Numbers of rows that a tile may have, ascending."""
        self.held: Held | None = None
        self._packs = _can_lay_out(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packs else weight

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` times the stacked weights, plus the bias, tile by tile."""
        flat = rows.reshape(-1, self.in_features)
        count = flat.shape[0]
        if count in self.sizes:
            made = self.multiply(flat)
        else:
            made = flat.new_empty(count, self.out_features)
            low = 0
            while low < count:
                size = self._next(count - low)
                high = min(low + size, count)
                tile = pad(flat[low:high], (0, 0, 0, size - (high - low)))
                made[low:high] = self.multiply(tile)[: high - low]
                low = high
        return made.view(*rows.shape[:-1], self.out_features)

    def weight(self) -> torch.Tensor:
        """The stacked weights, ``[out, in]``."""
        return self._weight.to_dense() if self._packs else self._weight

    def multiply(self, tile: torch.Tensor) -> torch.Tensor:
        """The product of one tile, in one call of the library."""
        if not self._packs:
            return linear(tile, self._weight, self.bias)
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            tile, self._weight, self.bias, "none", (), ""
        )
        return made

    def example(self) -> torch.Tensor:
        """Random rows that fill the largest tile, in half precision very often.

        Half precision rounds sums of other orders to the same number but for a few in 100,000.
        """
        count = SIZES[-1]
        if self._weight.dtype.itemsize < 4:
            count *= -(-_HALF_NUMBERS // (count * self.out_features))
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(count, self.in_features, generator=generator)
        return rows.to(self._weight.device, self._weight.dtype)

    def _next(self, left: int) -> int:
        """Number of rows in the next tile, where ``left`` rows are left to compute."""
        if left < REFERENCE:
            return min(size for size in self.sizes if size >= left)
        return max(size for size in self.sizes if size <= left)


@torch.inference_mode()
def steady_sizes(multiply: Multiply, rows: torch.Tensor) -> tuple[int, ...]:
    """The tile sizes that give each of these rows the bits that it has in a tile of eight.

    Raises UnsteadyProduct where a row's bits depend on its place in the tile of eight.
    """
    expected = _by_tiles(multiply, rows, REFERENCE)
    for shift in range(1, REFERENCE):
        if not torch.equal(_by_tiles(multiply, rows.roll(shift, 0), REFERENCE).roll(-shift, 0), expected):
            raise UnsteadyProduct
    return tuple(
        size for size in SIZES if size == REFERENCE or torch.equal(_by_tiles(multiply, rows, size), expected)
    )


def common_rows(features: Sequence[int], lanes: int) -> int:
    """Number of rows of which every pass must have a multiple, so that tensors of these widths fill vectors.

    A vector holds ``lanes`` numbers. Other code computes the remainder of a tensor, and may round otherwise.
    """
    needed = 1
    for width in features:
        while width * needed % lanes:
            needed *= 2
    return needed


def _by_tiles(multiply: Multiply, rows: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([multiply(tile) for tile in rows.split(size)])


def _can_lay_out(weight: torch.Tensor) -> bool:
    """Whether oneDNN's layout exists for this weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
