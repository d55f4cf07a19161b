"""The benchmark of retrieval-augmented generation runs small, with the plain loop's ids in every arm."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_guessed_retrievals_keep_the_plain_loops_ids(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench(
        *("rag", "--prompts", "1", "--tokens", "24", "--repeats", "1"),
        *("--passages", "60", "--search-ms", "0"),
    )

    assert result["identical"]
    arms = result["by_search_ms"]["0"]
    assert arms["plain"]["searches"] == 3
    assert all(0 <= arm["accuracy"] <= 1 for name, arm in arms.items() if name != "plain")
