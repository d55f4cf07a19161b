"""The liveness judge, on a clock of the test's own."""

import pytest

from orchestrator.fleet.liveness import LivenessJudge, Verdict


def test_beats_keep_it_alive() -> None:
    judge = LivenessJudge(0.0)
    for tenth in range(100):
        judge.beat(tenth / 10, 0)
        assert judge.verdict(tenth / 10 + 0.29) is Verdict.ALIVE


def test_silence_is_suspect_and_then_death() -> None:
    judge = LivenessJudge(0.0)
    assert judge.verdict(0.35) is Verdict.SUSPECT
    assert judge.verdict(0.6) is Verdict.SUSPECT
    assert judge.verdict(0.65) is Verdict.DEAD


def test_a_probe_has_half_of_the_patience_to_be_answered() -> None:
    judge = LivenessJudge(0.0, silent_s=4.0)
    assert judge.verdict(2.0) is Verdict.ALIVE
    assert judge.verdict(2.1) is Verdict.SUSPECT
    judge.answered(2.2)
    assert judge.verdict(4.1) is Verdict.ALIVE


def test_a_verifier_without_a_peer_may_be_silent_for_longer() -> None:
    judge = LivenessJudge(0.0)
    assert judge.verdict(1.7, lone=True) is Verdict.SUSPECT
    assert judge.verdict(1.9, lone=True) is Verdict.DEAD


def test_an_answered_probe_buys_time_for_a_long_step() -> None:
    judge = LivenessJudge(0.0)
    for second in range(1, 50):
        judge.answered(float(second))
        assert judge.verdict(second + 0.5) is Verdict.SUSPECT
    assert judge.silence(50.0) == 1.0


def test_what_this_process_slept_through_is_no_silence() -> None:
    judge = LivenessJudge(0.0)
    judge.beat(1.0, 0)
    judge.stood_still(6.0, 4.8)
    assert judge.verdict(6.0) is Verdict.ALIVE
    assert judge.silence(6.0) == pytest.approx(0.2)
    assert judge.verdict(6.5) is Verdict.DEAD


def test_a_beat_after_a_standstill_is_not_in_the_future() -> None:
    judge = LivenessJudge(0.0)
    judge.beat(5.9, 0)
    judge.stood_still(6.0, 4.8)
    assert judge.silence(6.5) == 0.5


def test_an_engine_that_does_not_step_for_a_minute_is_dead_though_it_answers() -> None:
    judge = LivenessJudge(0.0)
    judge.answered(61.0)
    assert judge.verdict(61.0) is Verdict.DEAD


def test_an_announced_step_may_take_five_times_as_long() -> None:
    judge = LivenessJudge(0.0)
    judge.beat(0.0, 30_000_000)
    judge.answered(149.0)
    assert judge.verdict(149.0) is Verdict.ALIVE
    judge.answered(151.0)
    assert judge.verdict(151.0) is Verdict.DEAD
