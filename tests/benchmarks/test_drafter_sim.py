"""The simulated drafter runs small, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_the_simulated_drafter_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("drafter_sim", "--count", "1", "--tokens", "16", "--temperature", "0")
    assert result["by_temperature"]["0"]["acceptance_length"] > 1.0
