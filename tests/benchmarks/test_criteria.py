"""The benchmark of criteria runs small, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.criteria import ARMS, distinct
from speculative.acceptance import CRITERIA


def test_repetitions_are_counted_within_a_text() -> None:
    texts = [(1, 2, 1, 2), (1, 2)]
    assert distinct(texts, 1) == 4 / 6
    assert distinct(texts, 2) == 3 / 4
    assert distinct([(1,)], 4) == 0


def test_every_criterion_is_measured() -> None:
    assert {arm.name for arms in ARMS.values() for arm in arms} == {"plain", "path_match", *CRITERIA}


@pytest.mark.slow
def test_what_is_printed_is_what_the_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("criteria", "--prompts", "1", "--tokens", "8")
    for arms in result["modes"].values():
        assert {arm["tokens"] for arm in arms} == {8}, "whatever the last round committed"
        plain, *exact = [arm for arm in arms if arm["promise"] == "same_ids"]
        assert all(arm["mean_logprob"] == plain["mean_logprob"] for arm in exact)
        assert [arm["total_variation"] for arm in arms if arm["promise"] != "relaxed"] == [0] * sum(
            arm["promise"] != "relaxed" for arm in arms
        )
        assert max(arm["acceptance_length"] for arm in arms) > 2
