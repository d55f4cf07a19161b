"""Trials of modes may lose a small share of the time, and a mode that failed rests longer each time."""

import pytest

from outrider.edge.latency_model import Mode
from outrider.edge.trials import FADING, FIRST_REST, HORIZON, LONGEST_REST, SHARE, ModeTrials

BOUND_MS = 10.0


def test_trials_may_lose_a_share_of_the_time_and_at_first_that_of_the_horizon() -> None:
    trials = ModeTrials()
    assert trials.left_ms(BOUND_MS) == pytest.approx(SHARE * BOUND_MS * HORIZON)
    trials.committed(4 * HORIZON, 0.0, BOUND_MS)
    assert trials.left_ms(BOUND_MS) == pytest.approx(4 * SHARE * BOUND_MS * HORIZON)


def test_what_trials_lost_is_missing_and_what_modes_saved_adds_no_more_than_the_horizon() -> None:
    trials = ModeTrials()
    first = trials.left_ms(BOUND_MS)
    trials.committed(1, 30.0, BOUND_MS)
    assert trials.left_ms(BOUND_MS) == pytest.approx(first - 30.0)
    trials.committed(1, -1e6, BOUND_MS)
    assert trials.left_ms(BOUND_MS) == pytest.approx(2 * first)


def test_a_prediction_is_corrected_by_what_was_measured_and_less_in_each_later_request() -> None:
    trials = ModeTrials()
    assert trials.corrected(Mode.PIPELINED, 6.0) == 6.0
    trials.measured(Mode.PIPELINED, 12.0, predicted_ms=6.0)
    assert trials.corrected(Mode.PIPELINED, 5.0) == pytest.approx(10.0)
    trials.begin()
    assert trials.corrected(Mode.PIPELINED, 5.0) == pytest.approx(5.0 * 2**FADING)


def test_each_failure_doubles_the_rest_until_the_mode_has_paid_for_a_while() -> None:
    trials = ModeTrials()

    def rest() -> int:
        """Tokens until the mode may be tried again."""
        tokens = 0
        while trials.is_resting(Mode.WAITING):
            trials.committed(1, 0.0, BOUND_MS)
            tokens += 1
        return tokens

    found = []
    for _ in range(9):
        trials.failed(Mode.WAITING, after=10)
        found.append(rest())
    assert found == [min(FIRST_REST << power, LONGEST_REST) for power in range(9)]
    trials.failed(Mode.WAITING, after=2 * LONGEST_REST)
    assert rest() == FIRST_REST


def test_an_unused_device_is_measured_after_ever_longer_pauses_until_it_is_used() -> None:
    trials = ModeTrials()

    def measured_at(tokens: int) -> list[int]:
        found = []
        for token in range(tokens):
            if trials.takes_measurement():
                found.append(token)
            trials.committed(1, 0.0, BOUND_MS)
        return found

    assert measured_at(600) == [0, 32, 96, 224, 352, 480]
    trials.used()
    assert measured_at(100) == [0, 32, 96]
