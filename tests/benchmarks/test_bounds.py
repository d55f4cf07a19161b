"""The bounds of methods that are not built: the benchmark runs small, its formula is right at the ends."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.bounds.neighbours import best_speed


@pytest.mark.slow
def test_the_benchmark_runs(bench: Callable[..., dict[str, Any]]) -> None:
    small = ("--prompts", "1", "--tokens", "16", "--entries", "2000", "--places", "40", "--file-mb", "2")
    result = bench("bounds", *small)

    tokens = result["streamed_weights"]["tokens_per_pass"]
    assert tokens["16"] <= tokens["256"]
    assert result["knn_lm"]["places"] == 39


def test_guesses_that_are_never_right_bring_nothing() -> None:
    assert best_speed(0.0, 10) == {"factor": 1.0, "stride": 1}


def test_guesses_that_are_always_right_share_one_search() -> None:
    assert best_speed(1.0, 100) == {"factor": round(16 * 101 / 116, 2), "stride": 16}
