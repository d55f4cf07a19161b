"""The target's own layers as drafters: what is measured runs small, and is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_parts_of_the_target_print_what_their_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    modes = bench("layer_parts", "--prompts", "1", "--tokens", "6")["modes"]
    for mode in modes.values():
        assert [row["layers"] for row in mode["by_exit"]] == list(range(1, 12))
        assert all(row["hit_4"] >= row["hit_1"] for row in mode["by_exit"])
        assert [row["sublayers"] for row in mode["by_skipped"]] == list(range(2, 24, 2))
        assert [row["sublayers"] for row in mode["by_sublayers"]] == list(range(1, 24))
        assert all(len(row["skipped"]) == row["sublayers"] / 2 for row in mode["by_skipped"])
