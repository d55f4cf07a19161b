"""The benchmark of small costs runs small, and prints what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest

from outrider.compiling.toolchain import find_compiler


@pytest.mark.slow
def test_small_costs_are_costs(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("small_costs", "--context", "128", "--repeats", "10")

    assert set(result["chunk_ms"]) == {"64", "128"}
    assert result["reader_process"]["processor_s"] > 0
    if find_compiler() is not None:
        assert result["sampled_row_ms"]["top_k"] < result["sampled_row_ms"]["temperature"]
    assert result["eager_pass_operators"] > 100, "twelve layers"
