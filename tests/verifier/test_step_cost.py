"""How long a step should take."""

from itertools import pairwise

import pytest

from verifier_service.engine.step_cost import StepCostModel

PROFILE = {1: 7.0, 4: 8.0, 8: 9.5, 16: 12.0}


def test_nothing_is_expected_before_a_step_was_seen() -> None:
    assert StepCostModel().expected_ms(10) == 0.0


def test_a_profile_holds_between_its_points_and_beyond_the_last() -> None:
    pace = StepCostModel(PROFILE)
    assert pace.expected_ms(4) == pytest.approx(8.0)
    assert pace.expected_ms(6) == pytest.approx(8.75)
    assert pace.expected_ms(32) == pytest.approx(17.0)


def test_a_larger_step_is_never_expected_to_be_faster() -> None:
    pace = StepCostModel({1: 7.0, 2: 6.5, 4: 8.0, 8: 7.9})
    times = [pace.expected_ms(rows) for rows in range(1, 40)]
    assert all(more >= fewer - 1e-9 for fewer, more in pairwise(times))


def test_sessions_cost_beside_their_rows() -> None:
    pace = StepCostModel(PROFILE, session_ms=0.5)
    assert pace.expected_ms(8, sessions=3) == pytest.approx(10.5)


def test_without_a_profile_all_sizes_start_out_alike_and_are_learnt() -> None:
    pace = StepCostModel()
    pace.record(1, 5.0)
    assert pace.expected_ms(16) == pytest.approx(5.0)
    for _ in range(200):
        pace.record(1, 5.0)
        pace.record(16, 9.0)
    assert pace.expected_ms(1) == pytest.approx(5.0, rel=0.05)
    assert pace.expected_ms(16) == pytest.approx(9.0, rel=0.05)


def test_a_busy_neighbour_slows_every_size_and_changes_no_comparison() -> None:
    pace = StepCostModel(PROFILE)
    before = pace.expected_ms(16) / pace.expected_ms(1)
    for _ in range(60):
        pace.record(1, 14.0)
    assert pace.expected_ms(1) == pytest.approx(14.0, rel=0.02)
    assert pace.expected_ms(16) / pace.expected_ms(1) == pytest.approx(before, rel=0.1)


def test_one_step_that_was_held_up_hardly_counts() -> None:
    pace = StepCostModel(PROFILE)
    pace.record(1, 2000.0)
    assert pace.expected_ms(1) < 3 * 7.0


def test_what_lies_between_forwards_counts_per_session() -> None:
    pace = StepCostModel(PROFILE)
    pace.record_overhead(2.0, sessions=4)
    assert pace.step_ms(4, sessions=4) == pytest.approx(10.0)


def test_rows_with_a_longer_past_cost_more() -> None:
    pace = StepCostModel(PROFILE, depth=64, deeper_ms=0.001)
    assert pace.expected_ms(8, depth=64) == pace.expected_ms(8) == pytest.approx(9.5)
    assert pace.expected_ms(8, depth=1064) == pytest.approx(9.5 + 8.0)
    assert pace.expected_ms(8, depth=10) == pytest.approx(9.5), "a past shorter than the profile's is no gain"


def test_a_long_past_is_not_taken_for_a_busy_neighbour() -> None:
    pace = StepCostModel(PROFILE, depth=64, deeper_ms=0.001)
    for _ in range(60):
        pace.record(8, 9.5 + 16.0, depth=2064)
    assert pace.expected_ms(8) == pytest.approx(9.5, rel=0.01)
    assert pace.expected_ms(1) == pytest.approx(7.0, rel=0.01)
