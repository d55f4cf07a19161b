"""Experiments: rounds follow from right and wrong places, rules stop where they say, and one runs small."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.experiments.__main__ import EXPERIMENTS, OutOfTime, measured
from benchmarks.experiments.chains import (
    acceptance_by_depth,
    acceptance_length,
    independent_length,
    pass_cost,
    rounds_of,
    speed,
)
from benchmarks.experiments.distance import crossing, hinting, pipelined, waiting
from benchmarks.experiments.experiment import Experiment, Judged, fields_of
from benchmarks.experiments.pair import Scale
from benchmarks.experiments.stopping import (
    ORACLE,
    RULES,
    BanditRule,
    BudgetRule,
    DraftedChain,
    HeuristicRule,
    product_below,
    rounds_under,
)
from benchmarks.experiments.timing_leak import area, best_guess
from benchmarks.plots.curves import Curve, Panel, chart_of
from benchmarks.shared.resumable import ResumeFile
from outrider.edge.latency_model import Conditions, Mode, predict

RIGHT = [True, True, False, True, True, True, False, False]


def chain(survival: float, right: int) -> DraftedChain:
    return DraftedChain([survival] * 12, [survival] * 12, [0.0] * 12, right)


def test_a_round_commits_its_accepted_tokens_and_one_more() -> None:
    assert rounds_of(RIGHT, 2) == [(2, 2), (2, 2), (1, 0), (0, 0)]
    assert acceptance_length([(2, 2), (2, 2), (1, 0), (0, 0)]) == 2.0


def test_the_rounds_of_a_text_commit_each_token_once_at_any_length() -> None:
    for length in range(1, 10):
        assert sum(accepted + 1 for _, accepted in rounds_of(RIGHT, length)) == len(RIGHT)


def test_acceptance_by_depth_counts_only_drafts_that_were_right_so_far() -> None:
    assert acceptance_by_depth([RIGHT], 3) == [(2, 2), (2, 2), (1, 2)]


def test_independent_tokens_give_the_geometric_sum() -> None:
    assert independent_length(0.5, 2) == 1.75
    assert independent_length(1.0, 4) == 5.0


def test_a_pass_of_more_rows_costs_more_unless_rows_are_free() -> None:
    assert pass_cost(1) == 1.0
    assert pass_cost(6) == pytest.approx(1.4)
    assert pass_cost(128) > pass_cost(64)
    assert pass_cost(64, is_free=True) == 1.0


def test_speed_is_tokens_over_the_time_of_drafts_and_passes() -> None:
    assert speed([(3, 3)], 0.22, is_free=True) == pytest.approx(4 / 1.66)


def test_the_oracle_drafts_only_what_is_accepted_and_no_rule_is_faster() -> None:
    texts = [
        [chain(0.9 if right else 0.3, right) for right in (5, 4, 3, 2, 1, 0, 0, 3, 2, 1, 0)] for _ in "ab"
    ]
    oracle = rounds_under(RULES[ORACLE](0.2), texts, 0.2)

    assert all(drafted == accepted for drafted, accepted in oracle)
    assert all(
        speed(rounds_under(rule(0.2), texts, 0.2), 0.2) <= speed(oracle, 0.2) for rule in RULES.values()
    )


def test_every_rule_commits_every_token_of_a_text() -> None:
    texts = [[chain(0.8, right) for right in (2, 1, 0, 0, 4, 3, 2, 1, 0)]]

    for rule in RULES.values():
        assert sum(accepted + 1 for _, accepted in rounds_under(rule(0.15), texts, 0.15)) == 9


def test_the_heuristic_drafts_two_more_after_success_and_one_fewer_after_failure() -> None:
    rule = HeuristicRule()
    lengths = [rule.stop(chain(0.5, 0))]
    for drafted, accepted in ((5, 5), (7, 3)):
        rule.learn(drafted, accepted, 1.0)
        lengths.append(rule.stop(chain(0.5, 0)))

    assert lengths == [5, 7, 6]


def test_the_product_stops_before_the_chain_is_unlikely() -> None:
    assert product_below(0.3)().stop(chain(0.7, 12)) == 3  # .7, .49, .343, .24


def test_the_budget_drafts_longer_where_drafts_are_cheap() -> None:
    assert BudgetRule(0.05).stop(chain(0.8, 12)) > BudgetRule(0.4).stop(chain(0.8, 12)) > 0
    assert BudgetRule(0.4).stop(chain(0.2, 12)) == 0


def test_the_bandit_settles_on_the_length_that_paid() -> None:
    rule = BanditRule()
    chosen = []
    for _ in range(400):
        chosen.append(rule.stop(chain(0.5, 0)))
        rule.learn(1, 1, 3.0 if chosen[-1] == 6 else 0.5)

    assert set(chosen[:4]) == set(BanditRule.LENGTHS)
    assert chosen[-100:].count(6) > 80


AT = Conditions(acceptance=0.75, draft_ms=1.0, verify_ms=20.0, rtt_ms=10.0)


def test_waiting_pays_a_round_trip_for_every_window() -> None:
    ms, passes = waiting([True] * 8, AT, 3)

    assert passes == 2
    assert ms == 2 * (10 + 20) + 3 + 3


def test_a_pipeline_pays_the_round_trip_once_for_a_run_without_mistakes() -> None:
    far = Conditions(acceptance=1.0, draft_ms=1.0, verify_ms=2.0, rtt_ms=100.0)

    assert pipelined([True] * 64, far, 8)[0] < waiting([True] * 64, far, 8)[0] / 4


def test_hints_never_slow_the_target_down_and_pay_where_they_are_near() -> None:
    for rtt_ms in (0.0, 30.0, 300.0):
        at = Conditions(0.75, 1.0, 20.0, rtt_ms)
        assert hinting(RIGHT * 8, at, 8)[0] <= 20.0 * len(RIGHT * 8)
    assert hinting([True] * 64, Conditions(1.0, 1.0, 20.0, 1.0), 8)[0] < 20.0 * 64 / 4


def test_independent_tokens_decode_at_the_pace_that_the_formula_predicts() -> None:
    drawn = random.Random(5)
    right = [drawn.random() < 0.75 for _ in range(40_000)]

    simulated = waiting(right, AT, 4)[0] / len(right)

    assert simulated == pytest.approx(predict(Mode.WAITING, AT, 4).ms_per_token, rel=0.02)


def test_a_crossing_lies_between_the_points_around_it() -> None:
    points = [{"rtt_ms": 0.0, "ms_per_token": 10.0}, {"rtt_ms": 100.0, "ms_per_token": 30.0}]

    assert crossing(points, 20.0) == 50.0
    assert crossing(points, 40.0) is None
    assert crossing(points, 5.0) == 0.0


def test_an_attacker_who_sees_no_difference_guesses() -> None:
    assert (best_guess([1.0, 1.0], [1.0]), area([1.0, 1.0], [1.0])) == (0.5, 0.5)
    assert (best_guess([0.2, 0.4], [0.9]), area([0.2, 0.4], [0.9])) == (1.0, 1.0)


def small_experiment(asked: list[Any]) -> Experiment:
    def measure(_pair: Any, key: Any) -> dict[str, Any]:
        asked.append(key)
        return {"x": key[0], "y": 2 * key[0]}

    return Experiment(
        name="small",
        question="Does y grow?",
        predictions=("y is above 1",),
        refuted_by="a y that does not",
        keys=lambda scale: [(1,), (2,)],
        measure=measure,
        judge=lambda rows: (Judged(str([row["y"] for row in rows]), all(row["y"] > 1 for row in rows)),),
        panels=lambda rows: (Panel("small", "x", "y", (Curve("y", (1.0, 2.0), (2.0, 4.0)),)),),
    )


class _NoModels:
    scale = Scale(2, 16, False)


def test_a_run_that_is_out_of_time_goes_on_at_the_next_arm() -> None:
    asked: list[Any] = []
    kept = ResumeFile(None, {})
    kept.add((1,), {"x": 1, "y": 2})
    experiment = small_experiment(asked)

    with pytest.raises(OutOfTime, match="1 of 2 arms of small"):
        measured(experiment, _NoModels(), kept, 1e-9)  # type: ignore[arg-type]
    rows = measured(experiment, _NoModels(), kept, 0)  # type: ignore[arg-type]

    assert asked == [(2,)]
    assert [row["y"] for row in rows] == [2, 4]


def test_a_result_carries_its_predictions_and_its_own_curves() -> None:
    fields = fields_of(small_experiment([]), [{"x": 1, "y": 2}, {"x": 2, "y": 1}])
    machine = {"processor": "p", "cores": 2}
    chart = chart_of({"name": "experiments", "machine": machine, "commit": "abc"} | fields)

    assert fields["claims"] == [{"predicted": "y is above 1", "measured": "[2, 1]", "holds": False}]
    assert not fields["holds"]
    assert chart.title == "outrider bench experiments small: p, 2 cores, commit abc"
    assert chart.panels == (Panel("small", "x", "y", (Curve("y", (1.0, 2.0), (2.0, 4.0)),)),)


@pytest.mark.parametrize(
    ("is_full", "flags"), [(True, "--full"), (False, "--prompts 4 --tokens 64")], ids=["full", "subset"]
)
def test_the_picture_says_how_much_was_measured(is_full: bool, flags: str) -> None:
    fields = fields_of(small_experiment([]), [{"x": 1, "y": 2}, {"x": 2, "y": 1}])
    settings = {"experiment": "small", "prompts": 4, "tokens": 64, "full": is_full}
    result = {"name": "experiments", "machine": {"processor": "p", "cores": 2}, "commit": "abc"}

    chart = chart_of(result | {"settings": settings} | fields)

    assert chart.title == f"outrider bench experiments small {flags}: p, 2 cores, commit abc"


def test_every_experiment_states_what_would_refute_it() -> None:
    for name, experiment in EXPERIMENTS.items():
        assert name == experiment.name
        assert experiment.predictions
        assert experiment.refuted_by


@pytest.mark.slow
def test_an_experiment_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("experiments", "X4", "--prompts", "2", "--tokens", "24")

    rows = {row["temperature"]: row for row in result["rows"]}
    assert rows[0.0]["session noise"] == rows[0.0]["likeliest token"]
    assert rows[1.3]["session noise"] >= rows[1.3]["likeliest token"]
    assert len(result["claims"]) == 3
