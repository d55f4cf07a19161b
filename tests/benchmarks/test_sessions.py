"""The sessions benchmark runs small, end to end, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_the_sessions_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    assert bench("sessions", "--opened", "40", "--parked", "20")["parked_ids"] > 32
