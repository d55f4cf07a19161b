"""Linear layers in tiles, attention over tiles: what is shown about a shape, and that results are right."""

import math

import pytest
import torch
from torch import nn

from outrider.lm.deterministic import kernel
from outrider.lm.deterministic.kernel import (
    GROUP,
    HIDDEN,
    TILE,
    TileKernel,
    TileShape,
    UnsteadyTiles,
    combine,
)
from outrider.lm.deterministic.linear import (
    REFERENCE,
    SIZES,
    TiledProduct,
    TiledProducts,
    UnsteadyProduct,
    common_rows,
    steady_sizes,
)

DTYPES = [torch.float32, torch.bfloat16]


def product(width: int, *outs: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> TiledProduct:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TiledProducts()([nn.Linear(width, out, bias=bias).to(dtype) for out in outs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(32, 48), (224, 61), (700, 1600)])
def test_a_row_has_the_same_bits_in_every_number_of_rows_and_at_every_place(
    dtype: torch.dtype, width: int, out: int
) -> None:
    tiled = product(width, out, dtype=dtype)
    rows = torch.randn(150, width).to(dtype)
    with torch.inference_mode():
        whole = tiled.compute(rows)
        for count in (1, 2, 3, 5, 7, 8, 9, 13, 31, 64, 65, 149):
            assert torch.equal(tiled.compute(rows[-count:]), whole[-count:])


def test_products_are_those_of_the_layers() -> None:
    layers = [nn.Linear(32, 48), nn.Linear(32, 16, bias=False)]
    tiled = TiledProducts()(layers)
    rows = torch.randn(1, 5, 32)

    with torch.inference_mode():
        expected = torch.cat([layer(rows) for layer in layers], dim=-1)
        torch.testing.assert_close(tiled.compute(rows), expected, rtol=1e-5, atol=1e-5)
        assert tiled.compute(rows[:, :0]).shape == (1, 0, 64)
        assert torch.equal(tiled.weight(), torch.cat([layer.weight for layer in layers]))


def test_other_dtypes_go_through_the_plain_product() -> None:
    tiled = product(32, 48, dtype=torch.float64)
    rows = torch.randn(11, 32, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(tiled.compute(rows)[3:4], tiled.compute(rows[3:4]), rtol=0, atol=0)


def test_only_sizes_with_the_bits_of_the_reference_are_used() -> None:
    def large_ones_round_otherwise(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1.0 if 4 <= len(rows) <= 16 else 1.1)

    assert steady_sizes(large_ones_round_otherwise, torch.randn(SIZES[-1], 3)) == (4, 8, 16)
    assert REFERENCE in SIZES


def test_half_precision_hides_other_orders_but_for_a_few_products_in_100_000() -> None:
    tiled = product(32, 32, dtype=torch.bfloat16)

    def single_rows_round_otherwise(tile: torch.Tensor) -> torch.Tensor:
        made = tiled.multiply(tile)
        rare = tile[0, 0] > 3.0  # 1.3 rows in 1,000, one of 32 products each
        return made + made.abs() * torch.eye(1, made.shape[1]) / 64 if len(tile) == 1 and rare else made

    assert 1 not in steady_sizes(single_rows_round_otherwise, tiled.example())


def test_a_product_that_depends_on_the_place_is_not_steady() -> None:
    def by_place(rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.arange(len(rows))[:, None]

    with pytest.raises(UnsteadyProduct):
        steady_sizes(by_place, torch.randn(SIZES[-1], 3))


@pytest.mark.parametrize(
    ("features", "rows"), [([224, 576], 1), ([48], 2), ([61], 32), ([], 1), ([64, 16, 8], 4)]
)
def test_a_pass_has_as_many_rows_as_fill_the_vectors(features: list[int], rows: int) -> None:
    assert common_rows(features, 32) == rows
    assert all(rows * width % 32 == 0 for width in features)


def shape(softcap: float | None = None, groups: int = 2, value_width: int = 16) -> TileShape:
    return TileShape(2, groups, 16, value_width, softcap, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "of", [shape(), shape(softcap=5.0), shape(groups=1), shape(groups=71), shape(value_width=24)]
)
def test_attention_over_tiles_put_together_is_attention(of: TileShape) -> None:
    kernel = TileKernel(of)
    block = kernel.blocks[-1]
    tiles, seen = 3, 2 * TILE + 9
    query = torch.randn(2, block, 16)
    keys, values = torch.randn(2, tiles * TILE, 16), torch.randn(2, tiles * TILE, of.value_width)
    mask = torch.zeros(tiles * TILE)
    mask[seen:] = HIDDEN
    by_tile = [part.unflatten(1, (tiles, TILE)).transpose(0, 1) for part in (keys, values)]
    parts = torch.zeros(GROUP, block, 2, of.value_width)
    spreads = torch.full((GROUP, block, 2), HIDDEN)
    parts[:tiles], spreads[:tiles] = kernel.attend(
        query.expand(tiles, -1, -1, -1),
        *by_tile,
        mask.view(tiles, 1, 1, TILE).expand(-1, -1, block, -1).contiguous(),
        0.25,
    )
    sinks = torch.randn(block, 2)

    scores = query @ keys[:, :seen].transpose(1, 2) * 0.25
    if of.softcap is not None:
        scores = torch.tanh(scores / of.softcap) * of.softcap
    with_sink = torch.cat((scores, sinks.t().unsqueeze(-1)), dim=-1).softmax(-1)[..., :-1]
    for given, weights in ((None, scores.softmax(-1)), (sinks, with_sink)):
        expected = (weights @ values[:, :seen]).transpose(0, 1)
        torch.testing.assert_close(combine(parts.clone(), spreads, given), expected, rtol=1e-4, atol=1e-5)


def test_tiles_that_nobody_asked_for_change_no_bit() -> None:
    parts, spreads = torch.randn(GROUP, 5, 2, 16), torch.randn(GROUP, 5, 2)
    more_parts = torch.cat((parts, torch.zeros(3 * GROUP, 5, 2, 16)))
    more_spreads = torch.cat((spreads, torch.full((3 * GROUP, 5, 2), HIDDEN)))

    alone = combine(parts.clone(), spreads, None)
    assert torch.equal(combine(more_parts.clone(), more_spreads, None), alone)
    assert torch.equal(combine(more_parts.roll(GROUP, 0), more_spreads.roll(GROUP, 0), None), alone)


def test_attention_that_depends_on_what_is_beside_it_is_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TileKernel.attend

    def by_number(self: TileKernel, query: torch.Tensor, *others: torch.Tensor) -> object:
        mixed, spread = attend(self, query, *others)  # type: ignore[arg-type]
        return mixed * math.pow(1.0001, len(query)), spread

    monkeypatch.setattr(TileKernel, "attend", by_number)
    with pytest.raises(UnsteadyTiles):
        TileKernel(shape())


def test_an_exponential_that_depends_on_its_place_is_not_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_exp_is_steady", lambda _: False)
    with pytest.raises(UnsteadyTiles):
        TileKernel(shape())
