"""Eager beside compiled passes: what counts as a difference, and a small run that its schema describes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.numerics import NEAR, ClassComparison
from outrider.compiling.toolchain import find_compiler

EAGER = np.array([[1.0, 3.0, 2.0], [5.0, 4.99, 0.0], [0.0, 0.5, 4.0]], dtype=np.float32)


def test_a_row_differs_where_the_other_class_prefers_another_id() -> None:
    compiled = EAGER.copy()
    compiled[1, 1] += 0.02
    found = ClassComparison(0.0)
    assert found.add(EAGER[:1], compiled[:1], np.zeros((1, 3))) == [1]
    assert found.add(EAGER[1:], compiled[1:], np.zeros((2, 3))) == [0, 2], "the text goes on with eager ids"
    figures = found.figures()
    assert (figures["rows"], figures["differing"]) == (3, 1)
    assert figures["other_ids_per_1000"] == pytest.approx(1000 / 3, abs=1e-3)
    assert figures["margins_at_differences"] == {"count": 1, "median": 0.01, "largest": 0.01}
    assert figures["largest_logit_difference"] == figures["largest_margin_change"] == 0.02
    # One row of three is near, and margins change by 0.02 / 3 on average, half of the time downwards.
    assert figures["expected_other_ids_per_1000"] == pytest.approx(1000 / 3 / NEAR * 0.01 / 3, rel=0.05)


def test_a_sampled_row_is_compared_under_its_noise() -> None:
    compiled = EAGER.copy()
    compiled[0, 2] += 0.02
    noise = np.zeros((3, 3))
    noise[0, 2] = 1.24  # ids 1 and 2 of the first row are 1 / 0.8 apart
    found = ClassComparison(0.8)
    assert found.add(EAGER, compiled, noise) == [1, 0, 2]
    assert found.figures()["margins_at_differences"]["largest"] == pytest.approx(0.01)


def test_rows_of_one_class_do_not_differ() -> None:
    found = ClassComparison(0.0)
    found.add(EAGER, EAGER, np.zeros((3, 3)))
    figures = found.figures()
    assert figures["differing"] == figures["expected_other_ids_per_1000"] == 0
    assert figures["margins_at_differences"] == {"count": 0, "median": None, "largest": None}
    assert figures["smallest_margin"] == pytest.approx(0.01)


@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
def test_the_numerics_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("numerics", "--prompts", "3", "--prompt", "40", "--tokens", "8", "--sessions", "2")
    assert result["numerics"][0] != result["numerics"][1]
    for figures in result["figures"].values():
        assert figures["rows"] == 24
        assert 0 < figures["largest_logit_difference"] < 1e-3, "two classes, and the same text"
