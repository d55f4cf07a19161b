"""Threads are chosen from measured passes: the fewest that are about as fast as the best number."""

from pathlib import Path

import pytest
import torch

from outrider.lm.autotune.threads import candidates, choose_threads
from outrider.lm.runner import PackedLM


@pytest.fixture(autouse=True)
def threads_of_other_tests_stay() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_powers_of_two_are_compared_below_the_most() -> None:
    assert candidates(1) == [1]
    assert candidates(2) == [2, 1]
    assert candidates(15) == [15, 8, 4, 2, 1]
    assert candidates(16) == [16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({8: {1: 9.0, 8: 12.0, 64: 20.0}, 1: {1: 3.0, 8: 5.0, 64: 30.0}}, 1),
        ({8: {1: 9.0, 8: 12.0, 64: 20.0}, 1: {1: 50.0, 8: 80.0, 64: 160.0}}, 8),
        ({8: {1: 1.0, 8: 1.0}, 4: {1: 1.05, 8: 1.05}, 2: {1: 1.6, 8: 1.6}, 1: {1: 3.0, 8: 3.0}}, 4),
        ({4: {1: 1.0, 8: 2.0, 64: 9.0}, 1: {1: 1.0, 8: 2.0}}, 1),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_are_taken(
    times: dict[int, dict[int, float]], chosen: int
) -> None:
    assert choose_threads(times) == chosen


def test_a_model_is_loaded_with_the_threads_that_were_measured(tiny_llama: Path) -> None:
    lm = PackedLM.load(tiny_llama, threads=2, fewer_threads=True, check=False)
    assert torch.get_num_threads() in (1, 2)
    assert (lm.forward_calls, lm.rows, lm.pool.used_slots) == (0, 0, 0)


def test_threads_that_were_asked_for_are_kept(tiny_llama: Path) -> None:
    PackedLM.load(tiny_llama, threads=2, check=False)
    assert torch.get_num_threads() == 2
