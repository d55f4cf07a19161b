"""The benchmark of small costs runs small, and prints what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_small_costs_are_costs(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("small_costs", "--context", "128", "--repeats", "10")

    assert set(result["chunk_ms"]) == {"64", "128"}
    assert result["reader_process"]["processor_s"] > 0
    assert result["eager_pass_operators"] > 100, "twelve layers"
