"""The arithmetic of figures: rates, paired ratios, equality of ids."""

from itertools import islice
from typing import Any

import pytest

from benchmarks.shared import figures


def run(arm: str, prompt: int, repeat: int, tokens: int, seconds: float, **more: Any) -> figures.TimedRun:
    return figures.TimedRun(arm, prompt, repeat, tuple(range(tokens)), seconds, **more)


def test_a_rate_sums_tokens_and_seconds_before_it_divides() -> None:
    runs = [run("plain", 0, 0, 10, 1.0), run("plain", 1, 0, 10, 3.0)]

    assert figures.tokens_per_second(runs) == 5.0


def test_the_rate_of_several_repeats_is_their_median() -> None:
    runs = [run("plain", 0, repeat, 10, seconds) for repeat, seconds in enumerate((1.0, 2.0, 10.0))]

    assert figures.tokens_per_second(runs) == 5.0


def test_acceptance_length_is_tokens_over_rounds_of_all_requests_together() -> None:
    runs = [run("speculative", 0, 0, 12, 1.0, rounds=3), run("speculative", 1, 0, 4, 1.0, rounds=4)]

    assert figures.acceptance_length(runs) == pytest.approx(16 / 7, abs=1e-3)


def test_a_paired_ratio_compares_the_same_prompt_in_the_same_repeat() -> None:
    runs = [
        run(arm, 0, repeat, 10, seconds) for repeat in range(10) for arm, seconds in (("a", 1.0), ("b", 2.0))
    ]

    assert figures.paired_ratio(runs, "a", "b") == {"median": 2.0, "low": 2.0, "high": 2.0, "pairs": 10}


def test_the_interval_leaves_out_what_a_fair_coin_would() -> None:
    # Order statistics for n = 10: the second smallest to the second largest cover 97.9 %.
    runs = [run("a", 0, i, 10, 1.0 / (i + 1)) for i in range(10)] + [
        run("b", 0, i, 10, 1.0) for i in range(10)
    ]

    ratio = figures.paired_ratio(runs, "a", "b")

    assert (ratio["low"], ratio["high"]) == (2.0, 9.0)


def test_ids_that_differ_in_one_repeat_are_not_the_same() -> None:
    runs = [run("plain", 0, 0, 4, 1.0), run("speculative", 0, 0, 4, 1.0), run("speculative", 0, 1, 5, 1.0)]

    assert figures.same_ids(runs[:2], ["plain", "speculative"])
    assert not figures.same_ids(runs, ["plain", "speculative"])


def test_arms_run_forwards_and_backwards_in_turn() -> None:
    assert list(islice(figures.alternating_orders("ab"), 3)) == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_no_runs_are_not_the_same_ids() -> None:
    assert not figures.same_ids([], ["plain"])
