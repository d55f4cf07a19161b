"""The latency model gives the published table, and never promises more than the arithmetic allows."""

import math

import pytest

from outrider.edge.latency_model import (
    Conditions,
    Mode,
    best_window,
    break_even_rtt_ms,
    expected_tokens,
    predict,
    window_of_a_pass,
    windows_in_flight,
)

RTTS = (1, 20, 50, 100, 200)
# ms per committed token at these round trips, by (verify_ms, draft_ms, acceptance): the table of
# docs/edge.md, from a simulation of events. A waiting target takes the best window of at most 32 tokens.
WAITING = {
    (5, 1, 0.6): (4.1, 13, 25, 46, 86),
    (20, 1, 0.8): (6.7, 11, 17, 28, 48),
    (50, 5, 0.9): (15, 17, 21, 28, 39),
}
PIPELINED = {
    (5, 1, 0.8): (2.5, 6.1, 12, 22, 42),
    (20, 5, 0.8): (10, 14, 19, 29, 49),
    (50, 5, 0.9): (12, 14, 17, 22, 32),
}
HINTING = {
    (20, 1, 0.8): (8.0, 10, 12, 16, 19),
    (20, 5, 0.8): (10, 13, 15, 18, 20),
    (50, 5, 0.9): (13, 14, 16, 20, 26),
}


def conditions(case: tuple[float, float, float], rtt_ms: float) -> Conditions:
    verify_ms, draft_ms, acceptance = case
    return Conditions(acceptance, draft_ms, verify_ms, rtt_ms)


@pytest.mark.parametrize("case", WAITING)
def test_waiting_costs_what_the_table_says(case: tuple[float, float, float]) -> None:
    for rtt_ms, published in zip(RTTS, WAITING[case], strict=True):
        at = conditions(case, rtt_ms)
        found = predict(Mode.WAITING, at, best_window(at)).ms_per_token
        assert found == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("mode", "table"), [(Mode.PIPELINED, PIPELINED), (Mode.HINTING, HINTING)])
def test_the_other_modes_are_near_the_simulated_table(
    mode: Mode, table: dict[tuple[float, float, float], tuple[float, ...]]
) -> None:
    for case, row in table.items():
        for rtt_ms, simulated in zip(RTTS[1:], row[1:], strict=True):
            at = conditions(case, rtt_ms)
            found = predict(mode, at, window_of_a_pass(at, 8)).ms_per_token
            assert found == pytest.approx(simulated, rel=0.15)


def test_windows_longer_than_a_pass_cost_time_where_drafts_are_wrong() -> None:
    at = Conditions(0.8, 8.0, 12.0, 5.0)
    short, long = (predict(Mode.PIPELINED, at, window) for window in (window_of_a_pass(at, 8), 8))
    assert short.ms_per_token < 0.8 * long.ms_per_token
    assert short.rounds_per_token > long.rounds_per_token
    sure = Conditions(1.0, 8.0, 12.0, 5.0)
    assert predict(Mode.PIPELINED, sure, 8).ms_per_token == predict(Mode.PIPELINED, sure, 2).ms_per_token


@pytest.mark.parametrize(("draft_ms", "window"), [(0.5, 8), (3.0, 4), (11.0, 2), (40.0, 2)])
def test_a_window_of_a_pass_is_what_is_drafted_meanwhile(draft_ms: float, window: int) -> None:
    assert window_of_a_pass(Conditions(0.8, draft_ms, 12.0, 5.0), 8) == window


@pytest.mark.parametrize(
    ("case", "waiting", "pipelined"),
    [((5, 1, 0.6), 3, 4), ((20, 1, 0.8), 63, 66), ((20, 5, 0.9), 69, 125), ((50, 20, 0.9), 96, 245)],
)
def test_the_window_of_distance_ends_where_the_table_says(
    case: tuple[float, float, float], waiting: float, pipelined: float
) -> None:
    at = conditions(case, 1)
    assert break_even_rtt_ms(Mode.WAITING, at) == pytest.approx(waiting, abs=1)
    assert break_even_rtt_ms(Mode.PIPELINED, at) == pytest.approx(pipelined, abs=1)


@pytest.mark.parametrize("case", [(5, 5, 0.9), (20, 20, 0.6), (5, 20, 0.9)])
def test_a_device_as_slow_as_the_target_never_wins(case: tuple[float, float, float]) -> None:
    at = conditions(case, 1)
    assert break_even_rtt_ms(Mode.WAITING, at) <= 0.01
    assert predict(Mode.HINTING, at, 8).ms_per_token == at.own_ms


def test_hinting_is_never_slower_than_the_cloud_alone() -> None:
    for acceptance in (0.0, 0.3, 0.6, 0.9, 1.0):
        for draft_ms in (0.1, 5, 19, 20, 50):
            for rtt_ms in (0, 1, 20, 200, 2000):
                at = Conditions(acceptance, draft_ms, 20, rtt_ms)
                hinted = predict(Mode.HINTING, at, 8)
                assert 0 < hinted.ms_per_token <= at.own_ms
                assert 0 < hinted.rounds_per_token <= 1.0


def test_expected_tokens_count_the_targets_own() -> None:
    assert expected_tokens(0.0, 8) == 1
    assert expected_tokens(1.0, 8) == 9
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_more_windows_travel_the_longer_the_way() -> None:
    near, far = Conditions(0.8, 1, 20, 1), Conditions(0.8, 1, 20, 200)
    assert windows_in_flight(near, 8, 8) < windows_in_flight(far, 8, 64)
    assert windows_in_flight(far, 8, 8) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("acceptance", 1.1), ("draft_ms", 0), ("verify_ms", math.inf), ("rtt_ms", -1), ("cloud_ms", math.nan)],
)
def test_conditions_that_cannot_be_are_refused_by_name(field: str, value: float) -> None:
    given = {"acceptance": 0.5, "draft_ms": 1, "verify_ms": 1, "rtt_ms": 1, field: value}
    with pytest.raises(ValueError, match=field):
        Conditions(**given)
