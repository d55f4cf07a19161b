"""Attention of queries over tiles of keys, and the sum over tiles, in one fixed order.

Keys come in tiles of 64 positions. Tile t holds the positions from 64 t on, so a key's tile and its place in
the tile follow from its position alone. Every call of the library computes blocks of queries, each over one
tile; all blocks of a call have one shape. The tiles of a row are added in order of position: in a fixed tree
within each group of eight, the groups one after another. A tile that a row does not see adds an exact zero.
Knows nothing about sessions, slots or trees.
"""

from dataclasses import dataclass

import torch

TILE = 64
"""Number of positions in a tile of keys."""

GROUP = 8
"""Number of tiles that are added as a tree; a power of two."""

HIDDEN = -1e30
"""Number added to the score of a hidden key: the key's weight is exactly zero, and no result is NaN."""

BLOCK = 32
"""Number of queries in the block whose bits count; more only where more query heads share a key head."""

_SMALLEST = 4


@dataclass(frozen=True, slots=True)
class TileShape:
    """Shape of a call that decides its order of additions, apart from the number of tiles and the block."""

    heads: int
    """Number of key heads."""
    groups: int
    """Number of query heads that share a key head."""
    width: int
    """Width of a key."""
    value_width: int
    """Width of a value."""
    softcap: float | None
    """Cap of the scores, or None."""
    device: torch.device
    dtype: torch.dtype


class UnsteadyTiles(Exception):
    """A query's result depends on its place in the block or on the tiles computed beside it."""


class TileKernel:
    """Attention over tiles of one shape."""

    def __init__(self, shape: TileShape) -> None:
        """Finds by random queries which block sizes give the bits of the largest. Raises UnsteadyTiles."""
        self.shape = shape
        self._fused = (
            shape.softcap is None and shape.width == shape.value_width and shape.device.type == "cpu"
        )
        largest = BLOCK
        while largest < shape.groups:
            largest *= 2
        self.rows = max(1, BLOCK // shape.groups)
        """Number of rows whose queries make one block."""
        self.blocks = self._steady_blocks(largest)
        """Numbers of queries that a block may have, ascending."""

    def block_for(self, queries: int) -> int:
        """Size of the smallest block that holds ``queries`` queries."""
        return next(block for block in self.blocks if block >= queries)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention within each tile, and the logarithm of its softmax's denominator.

        The results are ``[tiles, block, heads, value_width]`` and ``[tiles, block, heads]``.

        ``queries [tiles, heads, block, width]``, ``keys`` and ``values [tiles, heads, TILE, …]``, ``mask
        [tiles, 1, block, TILE]`` additive.
        """
        if self._fused:
            mixed, spread = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
            )
            return mixed.transpose(1, 2), spread.transpose(1, 2)
        scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
        if self.shape.softcap is not None:
            scores = torch.tanh(scores / self.shape.softcap) * self.shape.softcap
        scores = scores + mask
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        mixed = torch.matmul(weights, values) / total
        return mixed.transpose(1, 2), (top + total.log()).squeeze(-1).transpose(1, 2)

    @torch.inference_mode()
    def _steady_blocks(self, largest: int) -> tuple[int, ...]:
        shape = self.shape
        generator = torch.Generator().manual_seed(2)

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(shape.device, shape.dtype)

        queries = draw(3, shape.heads, largest, shape.width)
        keys, values = (draw(3, shape.heads, TILE, width) for width in (shape.width, shape.value_width))
        mask = torch.zeros(3, 1, largest, TILE, device=shape.device, dtype=shape.dtype)
        mask[0, :, :, 21:] = HIDDEN
        mask[2, :, ::3, :40] = HIDDEN
        scale = shape.width**-0.5
        expected = self.attend(queries, keys, values, mask, scale)

        def equals(low: int, high: int, shift: int, block: int) -> bool:
            """Whether tiles ``[low, high)`` give the same bits for queries in another order and in blocks."""
            moved = [part.roll(shift, 2)[low:high].split(block, 2) for part in (queries, mask)]
            made = [
                self.attend(query, keys[low:high], values[low:high], each, scale)
                for query, each in zip(*moved, strict=True)
            ]
            return all(
                torch.equal(torch.cat(parts, 1).roll(-shift, 1), whole[low:high])
                for parts, whole in zip(zip(*made, strict=True), expected, strict=True)
            )

        shifts = range(1, largest)
        if not all(equals(0, 3, shift, largest) for shift in shifts) or not _exp_is_steady(shape):
            raise UnsteadyTiles
        sizes = [_SMALLEST << step for step in range((largest // _SMALLEST).bit_length())]
        steady = [
            block
            for block in sizes
            if all(equals(low, high, 0, block) for low, high in ((0, 3), (0, 1), (1, 2), (2, 3), (1, 3)))
        ]
        if largest not in steady:
            raise UnsteadyTiles
        return tuple(steady)


def combine(parts: torch.Tensor, spreads: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention over all tiles ``[rows, heads, value_width]``; changes ``parts``.

    ``parts [tiles, rows, heads, value_width]`` and ``spreads [tiles, rows, heads]`` are results of
    `TileKernel.attend`, zero and HIDDEN for tiles that a row does not see; their number is a multiple of
    GROUP. ``sinks [rows, heads]`` are the scores of attention sinks.
    """
    top = spreads.amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = torch.exp(spreads - top)
    total = _in_order(weights)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return _in_order(parts.mul_(weights.unsqueeze(-1))).div_(total.unsqueeze(-1))


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension: a tree within each group, the groups in order."""
    groups = parts.unflatten(0, (-1, GROUP))
    while groups.shape[1] > 1:
        half = groups.shape[1] // 2
        groups = groups[:, :half] + groups[:, half:]
    total: torch.Tensor = groups[0, 0]
    for group in groups[1:, 0]:
        total = total + group
    return total


def _exp_is_steady(shape: TileShape) -> bool:
    """Whether an exponential has the same bits at every place of its argument in a tensor."""
    numbers = -torch.rand(200, generator=torch.Generator().manual_seed(3)).to(shape.device, shape.dtype) * 20
    whole = numbers.exp()
    return all(
        torch.equal(numbers[low:high].clone().exp(), whole[low:high])
        for low in (0, 1, 7, 16)
        for high in range(low + 1, 200, 13)
    )
