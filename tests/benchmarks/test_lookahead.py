"""The windows of look-ahead run small, and what is printed is what the schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_windows_print_what_their_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("lookahead", "--prompts", "1", "--tokens", "24", "--windows", "5x3")
    (row,) = result["modes"]["greedy"]
    assert row["rows_per_step"] > 8, "ten scouts once the window is full, and fewer at first"
