"""The first_token benchmark runs small, end to end, and what it prints is what its schema says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_a_start_with_an_empty_cache_downloads_the_model_and_a_second_start_does_not(
    bench: Callable[..., dict[str, Any]], tiny_llama: Path
) -> None:
    found = bench("first_token", "--repeats", "1", "--target", str(tiny_llama))
    weights = (tiny_llama / "model.safetensors").stat().st_size
    assert weights <= found["downloaded_bytes"] < 2 * weights
    for arm in found["seconds_to"].values():
        assert arm["ready"] < arm["first_token"]
