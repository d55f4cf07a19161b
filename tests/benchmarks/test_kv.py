"""Keys and values in int8 beside floats: what is measured runs small, and is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    "passes",
    [pytest.param("eager", marks=pytest.mark.slow), pytest.param("compiled", marks=pytest.mark.long)],
)
def test_int8_takes_less_than_a_third_of_the_memory_and_drafts_change_no_id(
    bench: Callable[..., dict[str, Any]], passes: str
) -> None:
    result = bench("kv", "--prompts", "2", "--prompt", "40", "--tokens", "12", "--passes", passes)
    assert 3 * result["bytes_per_token"]["int8"] < result["bytes_per_token"]["float32"]
    for mode in result["figures"].values():
        for figures in mode["deterministic"].values():
            assert figures["identical"] == result["streams"] == 2
        assert mode["fast"]["float32"]["streams_equal_to_float"] == 2
        if passes == "compiled":
            assert mode["fast"]["int8"]["identical"] == 2, "compiled passes have one set of bits for a row"
