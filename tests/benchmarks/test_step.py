"""The step benchmark runs small, end to end, and its parts add up to what it is meant to take apart."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.step.parts import MODEL, PARTS
from tests.in_time import in_time


@pytest.mark.slow
def test_the_step_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench(
        *("step", "--ids", "600", "--sessions", "1,2", "--steps", "6", "--repeats", "1"),
        *("--loop-tokens", "6", "--streams", "1,2"),
    )

    for mode in ("greedy", "sampled"):
        parts = result["parts_ms"][mode]["2"]
        assert set(parts) == set(PARTS)
        assert min(parts[part] for part in ("schedule", "rank", "plan", "choose", "commit", MODEL)) > 0
        inside = parts[MODEL] + parts["around_model"]
        # Another run's times, and the timers' own: the same order of magnitude is all that holds for sure.
        in_time(0.1 < inside / result["step_ms"][mode]["2"]["forward"] < 10, result)

    for delay in result["to_client"].values():
        assert 0 < delay["p50_ms"] <= delay["p99_ms"]
        assert delay["pass_ms"] > 0
