"""The outcome of a pass where the model computes on the CPU."""

import numpy as np
import pytest
import torch

from outrider.lm.outcome import HostOutcome


def test_a_row_in_float32_is_the_models_own_memory() -> None:
    logits = torch.randn(3, 50)
    outcome = HostOutcome(logits)
    assert len(outcome) == 3
    assert np.shares_memory(outcome.row(1), logits.numpy())
    assert np.shares_memory(outcome.rows(), logits.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_row_is_float32_whatever_the_model_computes_in(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 20).to(dtype)
    assert np.array_equal(HostOutcome(logits).row(1), logits[1].float().numpy())
    assert HostOutcome(logits).rows().dtype == np.float32


@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_the_likeliest_tokens_come_best_first_and_of_equals_the_lowest_id(count: int) -> None:
    dice = np.random.default_rng(count)
    rows = (dice.integers(-4, 4, (30, 40)) / 2).astype(np.float32)
    ids, logits = HostOutcome(torch.from_numpy(rows)).top(count)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    assert np.array_equal(ids, expected)
    assert np.array_equal(logits, np.take_along_axis(rows, expected, axis=1))


def test_a_row_of_few_finite_logits_names_no_others() -> None:
    row = torch.full((1, 9), -torch.inf)
    row[0, [7, 2]] = torch.tensor([1.0, 3.0])
    row[0, 4] = torch.nan
    ids, logits = HostOutcome(row).top(4)
    assert ids.tolist() == [[2, 7, -1, -1]]
    assert logits.tolist() == [[3.0, 1.0, -np.inf, -np.inf]]
    assert HostOutcome(row).top(1)[0].tolist() == [[2]]
