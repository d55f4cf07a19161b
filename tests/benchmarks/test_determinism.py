"""The benchmark of the deterministic profile runs small, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_the_determinism_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench(
        "determinism", "--repeats", "1", "--tokens", "512", "--alone", "256", "--alone-with", "256"
    )
    for pairs in result["with_profile"].values():
        assert [pair["rows_with_other_bits"] for pair in pairs.values()] == [0, 0]
    for pairs in result["without_profile"].values():
        assert all(pair["rows_with_other_bits"] > 0 for pair in pairs.values())
