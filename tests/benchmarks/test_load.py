"""The load benchmark runs small, end to end, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.long
@pytest.mark.timeout(630)
def test_the_load_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    small = ["--concurrency", "1,2", "--tokens", "8", "--repeats", "1", "--long-prompt", "200"]
    small += ["--history", "100", "--prompts", "1", "--untimed", "1", "--starts", "1"]
    assert bench("load", *small, timeout_s=600)["identical"] is True
