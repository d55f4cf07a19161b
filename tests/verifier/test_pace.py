"""How long a step should take."""

import pytest

from verifier_service.pace import StepPace


def test_nothing_is_expected_before_a_step_was_seen() -> None:
    assert StepPace().expected_ms(10) == 0.0


def test_steps_of_a_size_seen_take_what_they_took() -> None:
    pace = StepPace()
    pace.record(1, 5.0)
    pace.record(16, 9.0)
    assert pace.expected_ms(1) == 5.0
    assert pace.expected_ms(17) == 9.0


def test_a_mean_follows_what_is_measured() -> None:
    pace = StepPace()
    for _ in range(50):
        pace.record(4, 10.0)
    pace.record(4, 20.0)
    assert pace.expected_ms(4) == pytest.approx(12.0)
    for _ in range(50):
        pace.record(4, 20.0)
    assert pace.expected_ms(4) == pytest.approx(20.0, rel=0.01)


def test_a_larger_step_than_any_seen_scales_with_its_rows() -> None:
    pace = StepPace()
    pace.record(8, 10.0)
    assert pace.expected_ms(64) == 80.0
    assert pace.expected_ms(2) == 10.0
