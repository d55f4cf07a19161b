"""The comparison of policies runs small, its schema describes the result, and the oracle knows the answer."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.policies import OracleDepth, answers_of
from outrider.cli.local.up_settings import embedded
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from speculative.policies.policy import DraftLimits, SeenProgress


def test_the_oracle_s_depth_is_the_run_of_right_places_ahead() -> None:
    oracle = OracleDepth(DraftLimits(3, 0.0, 9, 9), [True, True, True, True, False, True])
    depths = []
    for tokens in (1, 2, 1, 1, 1):
        depths.append(oracle.limits.depth)
        oracle.saw(SeenProgress(tokens, ()))
    assert depths == [3, 3, 1, 1, 1], "no deeper than the bounds, and never less than one place"


def test_a_second_turn_is_answered_behind_the_first_and_its_answer() -> None:
    target = PackedLM.load(str(embedded("target")), check=False)
    greedy = SamplingParams(temperature=0.0)

    first, second = answers_of(target, ("def add(a, b):\n", "\n\ndef sub(a, b):\n"), greedy, 0, 6)

    assert second.ids[: len(first.ids)] == first.ids
    assert second.prompt_length > len(first.ids)


@pytest.mark.slow
def test_the_comparison_of_policies_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    small = ("--count", "1", "--tokens", "12", "--temperature", "0", "--drafter-step", "1")
    result = bench("policies", *small, "--depths", "1", "4", "--policies", "survival", "bandit")
    sets = ["held_out 0", "edits 0", "multi_turn 0", "related 0", "repeated 0"]
    assert [row["set"] for row in result["rows"]] == sets
    assert set(result["least_over_best_fixed"]) == {"survival", "bandit"}
