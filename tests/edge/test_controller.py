"""The controller chooses by prediction, believes what it measures, and keeps to the stated preference."""

from collections.abc import Callable

import pytest

from outrider.edge.controller import PROBE, READABLE_MS, Controller, Preference
from outrider.edge.latency_model import Conditions, Mode, best_window, predict
from outrider.edge.measurements import Measurements
from outrider.edge.trials import FIRST_REST, ModeTrials


def measured(at: Conditions) -> Measurements:
    seen = Measurements()
    for _ in range(20):
        seen.round_trip(at.rtt_ms)
        seen.drafted(at.draft_ms)
    equal = round(1000 * at.acceptance)
    for _ in range(20):
        seen.judge(equal // 20, (1000 - equal) // 20)
    return seen


def as_modelled(at: Conditions) -> Callable[[Mode], float]:
    """A world that costs exactly what the model says."""
    return lambda mode: predict(mode, at, best_window(at, 8) if mode is Mode.WAITING else 8).ms_per_token


def run(controller: Controller, pace: Callable[[Mode], float], tokens: int = 400) -> float:
    """Milliseconds per token over so many tokens that come one by one."""
    total = 0.0
    for _ in range(tokens):
        took_ms = pace(controller.decision.mode)
        total += took_ms
        controller.committed(1, took_ms)
    return total / tokens


NEAR = Conditions(0.85, 1.0, 20.0, 5.0)
FAR = Conditions(0.7, 5.0, 20.0, 200.0)


def test_near_the_target_latency_takes_drafts_that_are_waited_for_or_ahead() -> None:
    controller = Controller(Preference.LATENCY, measured(NEAR))
    assert controller.decision.mode is Mode.CLOUD, "the cloud's own pace is measured first"
    assert run(controller, as_modelled(NEAR)) < 0.6 * NEAR.own_ms
    assert controller.decision.mode is not Mode.CLOUD


@pytest.mark.parametrize("preference", [Preference.LATENCY, Preference.BALANCED])
@pytest.mark.parametrize("at", [NEAR, FAR, Conditions(0.5, 20, 5, 50), Conditions(0.9, 1, 50, 300)])
def test_automatic_is_never_much_slower_than_the_cloud_alone(preference: Preference, at: Conditions) -> None:
    assert run(Controller(preference, measured(at)), as_modelled(at)) <= 1.05 * at.own_ms


def test_economy_halves_the_passes_where_latency_would_leave_the_device_idle() -> None:
    at = Conditions(0.85, 2.0, 20.0, 100.0)
    hasty, thrifty = (Controller(one, measured(at)) for one in (Preference.LATENCY, Preference.ECONOMY))
    run(hasty, as_modelled(at))
    run(thrifty, as_modelled(at))
    assert thrifty.decision.mode in {Mode.WAITING, Mode.PIPELINED}
    assert predict(thrifty.decision.mode, at, thrifty.decision.window).rounds_per_token < 0.5
    assert thrifty.decision.wait_ms >= at.rtt_ms


def test_economy_begins_the_next_request_with_the_device() -> None:
    trials, seen = ModeTrials(), measured(FAR)
    first = Controller(Preference.ECONOMY, seen, trials=trials)
    assert first.decision.mode is Mode.CLOUD, "the cloud's pace is not known"
    run(first, as_modelled(FAR), 20)
    second = Controller(Preference.ECONOMY, seen, trials=trials)
    assert second.decision.mode in {Mode.WAITING, Mode.PIPELINED}
    assert second.decision.wait_ms >= FAR.rtt_ms
    assert second.history == [(0, second.decision)]
    hasty = Controller(Preference.LATENCY, seen, trials=trials)
    assert hasty.decision.mode is Mode.CLOUD, "from so far away nothing saves time"


def test_where_time_counts_a_request_begins_with_hints_once_the_clouds_pace_is_known() -> None:
    trials, seen = ModeTrials(), measured(NEAR)
    first = Controller(Preference.LATENCY, seen, trials=trials)
    assert first.decision.mode is Mode.CLOUD
    run(first, as_modelled(NEAR), 100)
    second = Controller(Preference.LATENCY, seen, trials=trials)
    assert second.decision.mode is Mode.HINTING
    assert second.decision.wait_ms == 0, "no round waits before this text has shown what it is like"
    assert Controller(Preference.BALANCED, seen, trials=trials).decision.mode is Mode.CLOUD


def test_hints_are_tried_for_the_least_gain_and_rest_only_once_they_have_lost_time() -> None:
    at = Conditions(0.87, 0.9, 4.4, 50.0)
    promised = predict(Mode.HINTING, at, 4).ms_per_token
    assert 0.9 * at.own_ms < promised < at.own_ms, "less than a mode that waits has to promise"
    controller = Controller(Preference.LATENCY, measured(at))
    run(controller, as_modelled(at), PROBE)
    assert controller.decision.mode is Mode.HINTING
    for took_ms in [1.2 * at.own_ms] * 30 + [0.0] * 20:  # a long run of right drafts comes at once
        controller.committed(1, took_ms)
    assert controller.decision.mode is Mode.HINTING
    run(controller, lambda _: 1.2 * at.own_ms, 200)
    assert [decision.mode for _, decision in controller.history[:3]] == [Mode.CLOUD, Mode.HINTING, Mode.CLOUD]


def test_the_clouds_own_pace_is_measured_anew_at_a_fiftieth_of_the_time() -> None:
    trials, seen = ModeTrials(), measured(NEAR)
    cloud = 0
    for _ in range(40):  # requests
        controller = Controller(Preference.LATENCY, seen, trials=trials)
        for _ in range(128):
            mode = controller.decision.mode
            cloud += mode is Mode.CLOUD
            controller.committed(1, 20.0 if mode is Mode.CLOUD else 10.0)
    assert 2 * PROBE <= cloud <= 0.03 * 40 * 128


def test_economy_may_always_take_the_time_that_people_read_in() -> None:
    at = Conditions(
        0.85, 1.0, 4.0, 150.0
    )  # a fast target: four times its time is less than a round trip allows
    controller = Controller(Preference.ECONOMY, measured(at))
    ms = run(controller, as_modelled(at), 100)
    assert controller.decision.mode in {Mode.WAITING, Mode.PIPELINED}
    assert 4 * at.own_ms < ms <= READABLE_MS
    slow = Controller(Preference.ECONOMY, measured(at))
    run(slow, lambda mode: at.own_ms if mode is Mode.CLOUD else 2 * READABLE_MS, 100)
    assert slow.decision.mode is Mode.CLOUD


def test_a_mode_that_is_slower_than_predicted_is_left_and_rests_longer_each_time() -> None:
    controller = Controller(Preference.LATENCY, measured(NEAR))
    slow = 2 * NEAR.own_ms
    run(controller, lambda mode: NEAR.own_ms if mode is Mode.CLOUD else slow, 2000)
    starts = [token for token, decision in controller.history if decision.mode is not Mode.CLOUD]
    assert starts, "drafting was tried"
    tried = run(controller, lambda mode: NEAR.own_ms if mode is Mode.CLOUD else slow, 2000)
    assert tried < 1.05 * NEAR.own_ms


def test_what_a_request_found_out_the_next_one_knows() -> None:
    trials, seen = ModeTrials(), measured(NEAR)

    def slow(mode: Mode) -> float:
        return NEAR.own_ms if mode is Mode.CLOUD else 2 * NEAR.own_ms

    first = Controller(Preference.LATENCY, seen, trials=trials)
    run(first, slow, 60)
    assert len(first.history) > 1, "modes were tried"
    second = Controller(Preference.LATENCY, seen, trials=trials)
    run(second, slow, 30)
    tried = {decision.mode for _, decision in first.history} - {Mode.CLOUD}
    assert tried.isdisjoint(decision.mode for _, decision in second.history), "they rest"


def test_a_device_that_is_never_used_drafts_less_and_less() -> None:
    trials, seen = ModeTrials(), measured(FAR)
    drafted = []
    for _ in range(8):  # requests
        controller = Controller(Preference.LATENCY, seen, trials=trials)
        decisions = [controller.decision]
        for _ in range(128):
            if (decision := controller.committed(1, FAR.own_ms)) is not decisions[-1]:
                decisions.append(decision)
        assert {decision.mode for decision in decisions} == {Mode.CLOUD}
        drafted.append(sum(decision.window for decision in decisions))
    assert drafted[0] > drafted[-1] > 0, "acceptance and draft time stay known"
    assert sum(drafted) <= 0.08 * 8 * 128


def test_what_was_not_measured_is_not_guessed() -> None:
    controller = Controller(Preference.ECONOMY, Measurements())
    for _ in range(PROBE + 1):
        controller.committed(1, 20.0)
    assert controller.decision.mode is Mode.CLOUD
    assert "not measured" in controller.decision.why


def test_it_re_decides_when_the_connection_changes() -> None:
    seen = measured(NEAR)
    controller = Controller(Preference.BALANCED, seen)
    run(controller, as_modelled(NEAR), 100)
    assert controller.decision.mode is not Mode.CLOUD
    far = Conditions(0.85, 19.0, 20.0, 400.0)
    for _ in range(100):
        seen.round_trip(far.rtt_ms)
        seen.drafted(far.draft_ms)
    run(controller, as_modelled(far), 300)
    assert controller.decision.mode in {Mode.CLOUD, Mode.HINTING}


def test_it_is_off_on_request_and_on_again() -> None:
    controller = Controller(Preference.ECONOMY, measured(NEAR), enabled=False)
    run(controller, as_modelled(NEAR), 100)
    assert controller.decision.mode is Mode.CLOUD
    assert controller.decision.window == 0, "nothing is drafted, not even to measure"
    controller.enabled = True
    run(controller, as_modelled(NEAR), 100)
    assert controller.decision.mode is not Mode.CLOUD
    controller.enabled = False
    controller.committed(1, 10)
    assert controller.decision.window == 0


@pytest.mark.parametrize("mode", list(Mode))
def test_a_fixed_mode_stays_and_learns_how_long_to_wait(mode: Mode) -> None:
    controller = Controller(Preference.LATENCY, measured(NEAR), fixed=mode)
    run(controller, lambda _: 1000.0, 3 * FIRST_REST)
    assert controller.decision.mode is mode
    assert (controller.decision.wait_ms > 0) is (mode in {Mode.WAITING, Mode.PIPELINED})


def test_it_says_what_it_chose_and_why() -> None:
    controller = Controller(Preference.LATENCY, measured(NEAR))
    run(controller, as_modelled(NEAR))
    said = controller.explain()
    assert said["mode"] == controller.decision.mode
    assert said["rtt_ms"] == pytest.approx(NEAR.rtt_ms)
    assert said["acceptance"] == pytest.approx(NEAR.acceptance, abs=0.05)
    assert set(said["predicted_ms_per_token"]) == {mode.value for mode in Mode}
    for number in ("round trip 5 ms", "draft 1.0 ms", "latency"):
        assert number in controller.decision.why
