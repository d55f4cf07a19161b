"""Panels of weights in bfloat16 and int8 hold the rounded weights, and rounding does what its name says."""

import pytest
import torch

from outrider.lm.weight_only.packing import PackedWeight, WeightDtype, quantise, rounded

NAMES: list[WeightDtype] = ["bfloat16", "int8"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 3), (32, 8), (61, 40), (96, 7)])
def test_panels_give_the_rounded_weight_back(name: WeightDtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    packed = PackedWeight.of(weight, name, 32)
    assert torch.equal(packed.dense(), rounded(weight, name))
    assert packed.panels.shape == (-(-shape[0] // 32), shape[1], 32)


def test_a_weight_that_was_stored_in_bfloat16_keeps_its_values() -> None:
    weight = torch.randn(40, 24).to(torch.bfloat16).float()
    assert torch.equal(rounded(weight, "bfloat16"), weight)


def test_int8_is_within_half_a_step_and_the_steps_of_a_rows_largest_weight_are_127() -> None:
    weight = torch.randn(40, 24) * torch.logspace(-6, 3, 40)[:, None]
    codes, scales = quantise(weight, "int8")
    assert scales is not None
    assert ((rounded(weight, "int8") - weight).abs() <= 0.501 * scales[:, None]).all()
    assert codes.abs().amax(dim=1).tolist() == [127] * 40


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_zeros_stays_one(name: WeightDtype) -> None:
    weight = torch.stack((torch.zeros(5), torch.ones(5)))
    assert torch.equal(rounded(weight, name), weight)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_rounded_is_not_rounded_further(name: WeightDtype) -> None:
    once = rounded(torch.randn(40, 24), name)
    assert torch.allclose(rounded(once, name), once, rtol=1e-6, atol=0)
