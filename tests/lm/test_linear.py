"""Packed linear layers: the same products, whichever rows and readers share them."""

import copy
import weakref

import pytest
import torch
from torch import nn

from outrider.lm.autotune.products import TunedProducts
from outrider.lm.autotune.times_file import TimesFile
from outrider.lm.linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(nn.Linear(2, 2)), reason="this torch has no oneDNN")


class Gated(nn.Module):
    """Two readers of one input, one of their product, and one that a pass may leave out."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)
        self.extra = nn.Linear(width, width)
        self.use_extra = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made = self.down(torch.tanh(self.gate(rows)) * self.up(rows))
        return self.extra(made) if self.use_extra else made


def pair(width: int, inner: int) -> tuple[Gated, Gated]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        packed = Gated(width, inner)
    own = copy.deepcopy(packed)
    with torch.inference_mode():
        products = TunedProducts(TimesFile(None))
        assert pack_linears(packed, lambda: packed(torch.zeros(1, 1, width)), products) == 4
    return packed, own


@pytest.mark.parametrize(("width", "inner"), [(32, 48), (48, 32), (300, 500)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 33])
def test_products_are_those_of_the_own_layers(width: int, inner: int, rows: int) -> None:
    packed, own = pair(width, inner)
    packed.use_extra = own.use_extra = True
    inputs = torch.randn(1, rows, width)

    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(packed(inputs), own(inputs), rtol=1e-4, atol=1e-5)


def test_no_product_outlives_the_layers_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = pair(32, 48)
    product, made = packed.gate.product, []
    compute = product.compute

    def watched(rows: torch.Tensor) -> torch.Tensor:
        result = compute(rows)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(product, "compute", watched)
    with torch.inference_mode():
        for _ in range(2):
            packed(torch.randn(1, 3, 32))

    assert [result() for result in made] == [None, None], "layers' products would add up in every pass"


def test_layers_that_read_the_same_input_share_one_product() -> None:
    packed, _ = pair(32, 48)

    assert packed.gate.product is packed.up.product
    assert packed.down.product is not packed.gate.product
    assert isinstance(packed.extra, PackedLinear)


@pytest.mark.parametrize(("width", "inner"), [(32, 48), (120, 100)])
def test_weights_and_biases_can_still_be_read(width: int, inner: int) -> None:
    packed, own = pair(width, inner)

    with torch.inference_mode():
        for name in ("gate", "up", "down"):
            assert torch.equal(getattr(packed, name).weight, getattr(own, name).weight)
        assert torch.equal(packed.gate.bias, own.gate.bias)
        assert not packed.up.bias.any()
    assert packed.extra.bias is not None


def test_an_input_changed_in_place_between_passes_is_read_anew() -> None:
    packed, own = pair(32, 48)
    inputs = torch.randn(1, 5, 32)
    with torch.inference_mode():
        packed(inputs)
        inputs.mul_(2)
        torch.testing.assert_close(packed(inputs), own(inputs), rtol=1e-4, atol=1e-5)


def test_only_float32_on_the_cpu_is_packed() -> None:
    assert not can_pack(nn.Linear(2, 2).bfloat16())
    assert not can_pack(nn.Linear(2, 2, device="meta"))
