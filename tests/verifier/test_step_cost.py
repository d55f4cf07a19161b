"""How long a step should take."""

from itertools import pairwise

import pytest

from outrider.lm.step_profile import StepProfile
from verifier_service.engine.draft_budget import DecodingCost
from verifier_service.engine.step_cost import StepCostModel

PROFILE = {1: 7.0, 4: 8.0, 8: 9.5, 16: 12.0}


def test_nothing_is_expected_before_a_step_was_seen() -> None:
    assert StepCostModel().expected_ms(10) == 0.0


def test_a_profile_holds_between_its_points_and_beyond_the_last() -> None:
    costs = StepCostModel(PROFILE)
    assert costs.expected_ms(4) == pytest.approx(8.0)
    assert costs.expected_ms(6) == pytest.approx(8.75)
    assert costs.expected_ms(32) == pytest.approx(17.0)


def test_a_larger_step_is_never_expected_to_be_faster() -> None:
    costs = StepCostModel({1: 7.0, 2: 6.5, 4: 8.0, 8: 7.9})
    times = [costs.expected_ms(rows) for rows in range(1, 40)]
    assert all(more >= fewer - 1e-9 for fewer, more in pairwise(times))


@pytest.mark.parametrize("prefilled", [0, 3])
def test_a_range_of_sizes_costs_what_each_size_costs(prefilled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepCostModel(PROFILE, session_ms=0.5)
    for rows, nodes in ((1, 0), (5, 4), (9, 8)) * 5:
        costs.record(rows, 1.1 * PROFILE[1])
        costs.record_overhead(0.3 + 0.01 * nodes, 1, nodes)
    cost = DecodingCost(costs, bare=4, prefilled=prefilled, sessions=2, depth=100.0)
    each = [cost(rows) for rows in range(4, 30)]
    few = cost.between(4, 30)
    monkeypatch.setattr("verifier_service.engine.step_cost.FEW", -1)
    many = cost.between(4, 30)
    assert isinstance(few, list)
    assert not isinstance(many, list)
    assert few == list(many) == pytest.approx(each)


def test_sessions_cost_beside_their_rows() -> None:
    costs = StepCostModel(PROFILE, session_ms=0.5)
    assert costs.expected_ms(8, sessions=3) == pytest.approx(10.5)


def test_without_a_profile_all_sizes_start_out_alike_and_are_learnt() -> None:
    costs = StepCostModel()
    costs.record(1, 5.0)
    assert costs.expected_ms(16) == pytest.approx(5.0)
    for _ in range(200):
        costs.record(1, 5.0)
        costs.record(16, 9.0)
    assert costs.expected_ms(1) == pytest.approx(5.0, rel=0.05)
    assert costs.expected_ms(16) == pytest.approx(9.0, rel=0.05)


def test_a_busy_neighbour_slows_every_size_and_changes_no_comparison() -> None:
    costs = StepCostModel(PROFILE)
    before = costs.expected_ms(16) / costs.expected_ms(1)
    for _ in range(60):
        costs.record(1, 14.0)
    assert costs.expected_ms(1) == pytest.approx(14.0, rel=0.02)
    assert costs.expected_ms(16) / costs.expected_ms(1) == pytest.approx(before, rel=0.1)


def test_one_step_that_was_held_up_hardly_counts() -> None:
    costs = StepCostModel(PROFILE)
    costs.record(1, 2000.0)
    assert costs.expected_ms(1) < 3 * 7.0


def test_what_lies_between_forwards_counts_per_session() -> None:
    costs = StepCostModel(PROFILE)
    costs.record_overhead(2.0, sessions=4)
    assert costs.step_curve(sessions=4)(4) == pytest.approx(10.0)


def test_a_curve_of_steps_has_what_every_single_size_is_expected_to_take() -> None:
    costs = StepCostModel(PROFILE, session_ms=0.5, depth=64, deeper_ms=0.001)
    costs.record(8, 14.0)
    costs.record_overhead(2.0, sessions=4)
    assert costs.expected_ms(3) > 0, "one size is known already, the others are worked out by the curve"
    curve = costs.step_curve(3, depth=500)
    for rows in (1, 3, 7, 40):
        assert curve(rows) == pytest.approx(costs.expected_ms(rows, 3, 500) + 1.5)


def test_rows_with_a_longer_past_cost_more() -> None:
    costs = StepCostModel(PROFILE, depth=64, deeper_ms=0.001)
    assert costs.expected_ms(8, depth=64) == costs.expected_ms(8) == pytest.approx(9.5)
    assert costs.expected_ms(8, depth=1064) == pytest.approx(9.5 + 8.0)
    assert costs.expected_ms(8, depth=10) == pytest.approx(9.5), (
        "a past shorter than the profile's is no gain"
    )


def test_a_long_past_is_not_taken_for_a_busy_neighbour() -> None:
    costs = StepCostModel(PROFILE, depth=64, deeper_ms=0.001)
    for _ in range(60):
        costs.record(8, 9.5 + 16.0, depth=2064)
    assert costs.expected_ms(8) == pytest.approx(9.5, rel=0.01)
    assert costs.expected_ms(1) == pytest.approx(7.0, rel=0.01)


def test_a_new_profile_takes_the_place_of_what_steps_of_the_old_kind_taught() -> None:
    costs = StepCostModel(PROFILE, session_ms=0.5, depth=64, deeper_ms=0.001)
    for _ in range(200):
        costs.record(8, 90.0)
        costs.record(1, 30.0)
        costs.record_overhead(2.0, sessions=1)
    new = StepProfile({1: 1.5, 8: 3.0, 16: 5.0}, session_ms=0.1, depth=32, deeper_ms=0.0005)
    costs.use(new)
    for rows, sessions, depth in ((1, 1, 0), (4, 2, 100), (16, 3, 500)):
        expected = StepCostModel.of(new).expected_ms(rows, sessions, depth)
        assert costs.expected_ms(rows, sessions, depth) == expected
    assert costs.step_curve().fixed_ms == pytest.approx(2.0), "what lies between passes is the same"
