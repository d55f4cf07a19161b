"""How long a recovery asks for another verifier."""

import pytest

from orchestrator.relay.request_state import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    RecoveryPauses,
    RequestDeadline,
)


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(clock: RequestDeadline, time: Time) -> list[float]:
    pauses, made = RecoveryPauses(clock), []
    while (pause := pauses.next_s()) is not None:
        made.append(pause)
        time.now += pause
    return made


def test_pauses_double_up_to_the_longest() -> None:
    time = Time()
    made = asked(RequestDeadline(time, None, patience_s=10.0), time)
    assert made[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(made) == LONGEST_PAUSE_S
    assert sum(made) == pytest.approx(10.0)


def test_a_request_waits_until_its_deadline_and_no_longer() -> None:
    time = Time()
    clock = RequestDeadline(time, 3.0, patience_s=10.0)
    time.now += 1.0
    assert clock.time_left() == 2.0
    assert sum(asked(clock, time)) == pytest.approx(2.0)
    assert clock.time_left() == 0.0


def test_patience_is_counted_from_each_loss() -> None:
    time = Time()
    clock = RequestDeadline(time, None, patience_s=1.0)
    assert clock.time_left() is None
    assert sum(asked(clock, time)) == pytest.approx(1.0)
    time.now += 50.0
    assert sum(asked(clock, time)) == pytest.approx(1.0)
