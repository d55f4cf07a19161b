"""On a virtual clock: what the modes cost at a distance, and what the controller makes of that."""

import pytest

from outrider.edge.controller import Controller, Preference
from outrider.edge.latency_model import Conditions, Mode, best_window, predict, window_of_a_pass
from outrider.edge.measurements import Measurements
from outrider.edge.trials import ModeTrials
from tests.edge.far_cloud import Answered, FarCloud

TOKENS = 300
AS_FAST = 1.09
"""Times the best fixed mode's time that the controller may take; 28 of the 30 cases stay within 1.05."""
FIXED = tuple(Mode)


def known(at: Conditions) -> Measurements:
    """Measurements of a device that has drafted under these conditions before."""
    seen = Measurements(accepted=50 * at.acceptance, judged=50.0)
    seen.round_trip(at.rtt_ms)
    seen.drafted(at.draft_ms)
    return seen


def answer(
    at: Conditions,
    mode: Mode | None = None,
    preference: Preference = Preference.LATENCY,
    *,
    tokens: int = TOKENS,
    noise: float = 0.0,
) -> Answered:
    """One answer in a mode, or with modes as the controller chooses."""
    return FarCloud(at, Controller(preference, known(at), fixed=mode), tokens, noise=noise).run()


@pytest.mark.parametrize("mode", [None, *FIXED])
def test_every_mode_gives_the_targets_own_ids(mode: Mode | None) -> None:
    at = Conditions(0.8, 3.0, 12.0, 60.0)
    assert answer(at, mode, noise=0.3).ids == answer(at, Mode.CLOUD).ids


@pytest.mark.parametrize("rtt_ms", [1.0, 50.0, 200.0])
def test_a_pipeline_whose_drafts_are_all_right_hides_the_round_trip(rtt_ms: float) -> None:
    at = Conditions(1.0, 3.0, 12.0, rtt_ms)
    ms = answer(at, Mode.PIPELINED, Preference.BALANCED).ms / TOKENS
    assert ms < 1.2 * at.draft_ms + rtt_ms / TOKENS, "the target's own token behind a window ends no run"


@pytest.mark.parametrize("acceptance", [0.8, 0.9])
@pytest.mark.parametrize("rtt_ms", [5.0, 55.0, 105.0])
def test_the_modes_cost_about_what_the_model_says(rtt_ms: float, acceptance: float) -> None:
    at = Conditions(acceptance, 3.0, 12.0, rtt_ms)
    windows = {Mode.WAITING: best_window(at, 8), Mode.PIPELINED: window_of_a_pass(at, 8), Mode.HINTING: 8}
    for mode, window in windows.items():
        ms = answer(at, mode).ms / TOKENS
        assert ms == pytest.approx(predict(mode, at, window).ms_per_token, rel=0.25), mode


def test_short_windows_reach_the_target_sooner_than_long_ones() -> None:
    at = Conditions(0.8, 3.0, 12.0, 5.0)
    quick, thrifty = (answer(at, Mode.PIPELINED, one) for one in (Preference.LATENCY, Preference.ECONOMY))
    assert quick.ms < 0.92 * thrifty.ms
    assert thrifty.rounds < quick.rounds


@pytest.mark.parametrize("preference", [Preference.LATENCY, Preference.BALANCED])
@pytest.mark.parametrize("rtt_ms", [1.0, 50.0, 200.0])
@pytest.mark.parametrize("draft_ms", [1.0, 8.0])
@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95])
def test_automatic_is_never_more_than_5_percent_slower_than_the_cloud(
    acceptance: float, draft_ms: float, rtt_ms: float, preference: Preference
) -> None:
    at = Conditions(acceptance, draft_ms, 12.0, rtt_ms)
    alone = at.verify_ms * TOKENS
    assert answer(at, None, preference, noise=0.2).ms <= 1.05 * alone


@pytest.mark.parametrize("rtt_ms", [1.0, 20.0, 50.0, 100.0, 200.0])
@pytest.mark.parametrize("verify_ms", [5.0, 12.0])
def test_economy_takes_half_of_the_passes_at_any_distance(verify_ms: float, rtt_ms: float) -> None:
    at, seen, trials = Conditions(0.84, 1.2, verify_ms, rtt_ms), Measurements(), ModeTrials()
    rounds = 0
    for seed in range(6):  # requests, the first of a device that knows nothing
        controller = Controller(Preference.ECONOMY, seen, trials=trials)
        rounds += FarCloud(at, controller, 128, noise=0.2, seed=seed).run().rounds
    assert rounds <= 0.5 * 6 * 128


def requests(at: Conditions, mode: Mode | None = None) -> float:
    """Milliseconds of six requests of one device that knows nothing at first."""
    seen, trials = Measurements(), ModeTrials()
    return sum(
        FarCloud(
            at, Controller(Preference.LATENCY, seen, fixed=mode, trials=trials), 128, noise=0.2, seed=seed
        )
        .run()
        .ms
        for seed in range(6)
    )


@pytest.mark.parametrize("rtt_ms", [1.0, 20.0, 50.0, 100.0, 200.0])
@pytest.mark.parametrize("draft_ms", [1.0, 3.0])
@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95])
def test_over_several_requests_automatic_is_about_as_fast_as_the_best_mode(
    acceptance: float, draft_ms: float, rtt_ms: float
) -> None:
    at = Conditions(acceptance, draft_ms, 4.5 * draft_ms, rtt_ms)
    best = min(requests(at, mode) for mode in FIXED)
    probed = 12 * at.verify_ms  # tokens that the cloud decodes alone at first
    assert requests(at) <= AS_FAST * best + probed


@pytest.mark.parametrize("at", [Conditions(0.9, 1.0, 12.0, 1.0), Conditions(0.95, 3.0, 30.0, 50.0)])
def test_automatic_comes_near_the_best_mode_where_a_mode_pays(at: Conditions) -> None:
    best = min(answer(at, mode).ms for mode in FIXED)
    assert best < 0.5 * at.verify_ms * TOKENS
    probed = 12 * at.verify_ms  # tokens that the cloud decodes alone at first
    assert answer(at).ms <= 1.25 * best + probed
