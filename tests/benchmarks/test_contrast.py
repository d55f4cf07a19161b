"""The benchmark of contrastive decoding runs small: drafts change no id, and the amateur changes the text."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.contrast.__main__ import repeated_share


@pytest.mark.slow
def test_contrastive_ids_are_those_without_drafts(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("contrast", "--prompts", "1", "--tokens", "32", "--repeats", "1")

    assert result["identical"]
    assert set(result["by_strength"]) == {"0", "0.5", "1"}


@pytest.mark.parametrize(
    ("ids", "share"), [([1, 2, 3, 4, 5, 6], 0.0), ([1] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2), ([1], 0.0)]
)
def test_the_share_of_repeated_runs(ids: list[int], share: float) -> None:
    assert repeated_share(ids) == pytest.approx(share)
