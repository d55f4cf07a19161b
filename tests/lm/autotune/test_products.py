"""Every kernel gives the layer's product, and a shape is measured once, within its time."""

from itertools import count

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from outrider.lm.autotune import products, times_file
from outrider.lm.autotune.choice import UNMEASURED, KernelChoice, LinearKernel
from outrider.lm.autotune.measuring import measure_kernels
from outrider.lm.autotune.products import TunedProduct, TunedProducts
from outrider.lm.autotune.times_file import TimesFile
from outrider.lm.linear import can_pack

pytestmark = pytest.mark.skipif(not can_pack(nn.Linear(2, 2)), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def a_process_that_knows_nothing() -> None:
    times_file._of_process.cache_clear()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kernel", LinearKernel)
def test_every_kernel_gives_the_product(kernel: LinearKernel, biased: bool) -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48) if biased else None
    product = TunedProduct(weight, bias, KernelChoice((kernel,)))
    assert torch.equal(product.weight(), weight)
    with torch.inference_mode():
        for rows in (1, 2, 3, 4, 7, 64, 130):
            given = torch.randn(1, rows, 32)
            torch.testing.assert_close(
                product.compute(given), linear(given, weight, bias), rtol=1e-4, atol=1e-5
            )


def test_each_number_of_rows_goes_to_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[LinearKernel] = []

    def noting(kernel: LinearKernel, laid_out: torch.Tensor, bias: torch.Tensor | None) -> object:
        return lambda rows: called.append(kernel)

    monkeypatch.setattr(products, "multiply_by", noting)
    row, column, blocked, _ = LinearKernel
    product = TunedProduct(torch.randn(8, 4), None, KernelChoice((row, column, column, blocked)))
    for rows in (1, 2, 3, 4, 5, 600):
        product.compute(torch.zeros(1, rows, 4))
    assert called == [row, column, column, blocked, blocked, blocked]


def test_a_row_major_weight_of_one_layer_is_not_copied() -> None:
    layer = nn.Linear(4, 8)
    product = TunedProduct(layer.weight.detach(), None, KernelChoice((LinearKernel.ROW,)))
    assert product.weight().data_ptr() == layer.weight.data_ptr()


def test_layers_of_one_shape_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[torch.Size] = []

    def noting(weight: torch.Tensor, bias: torch.Tensor | None, limit_s: float) -> object:
        measured.append(weight.shape)
        return measure_kernels(weight, bias, limit_s)

    monkeypatch.setattr(products, "measure_kernels", noting)
    for _ in range(2):
        made = TunedProducts(TimesFile(None))
        found = [made([nn.Linear(4, 8)]), made([nn.Linear(4, 8)]), made([nn.Linear(8, 4)])]
        assert found[0].choice == found[1].choice
    assert measured == [(8, 4), (4, 8)]


def test_a_model_of_many_shapes_is_measured_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_MODEL_S", 0.0)
    assert TunedProducts(TimesFile(None))([nn.Linear(4, 8)]).choice is UNMEASURED


def test_a_measurement_ends_with_its_time_but_knows_one_row() -> None:
    ticks = count()
    found = measure_kernels(torch.randn(8, 4), None, 4.0, clock=lambda: float(next(ticks)))
    assert {tuple(by_rows) for by_rows in found.values()} == {(1,)}
    assert all(spent == 1.0 for by_rows in found.values() for spent in by_rows.values())


def test_a_large_weight_is_kept_in_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_TWICE_ELEMENTS", 31)
    times = {kernel: {1: 1.0, 64: 9.0} for kernel in LinearKernel}
    times[LinearKernel.ROW] = {1: 0.1, 64: 90.0}
    monkeypatch.setattr(products, "measure_kernels", lambda *_: times)
    assert len(TunedProducts(TimesFile(None))([nn.Linear(4, 8)]).laid_out) == 1
    assert len(TunedProducts(TimesFile(None))([nn.Linear(4, 7)]).laid_out) == 2
