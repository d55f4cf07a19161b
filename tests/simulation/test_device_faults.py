"""Devices that sleep, vanish, resume twice, send old windows or claim another session harm no stream."""

import pytest

from benchmarks.simulation.bugs import planted
from benchmarks.simulation.network import Weather
from benchmarks.simulation.plan import Plan, Turn, plan_of
from benchmarks.simulation.verifier import VerifierShape
from benchmarks.simulation.world import Outcome, simulate

HOUR_S = 3600.0


def turn(
    device: str, act: str = "nothing", *, seed: int = 7, asleep_s: float = 0.0, after_s: float = 0.2
) -> Turn:
    return Turn((1, 2, 3), 40, 1, seed, 0, None, False, True, act, after_s, 0.1, False, device, asleep_s)


def outcome(*turns: Turn) -> Outcome:
    """Two clients at once, the first with these turns; nothing else goes wrong."""
    plan = Plan(
        seed=1,
        weather=Weather(0.002),
        verifiers=(VerifierShape(0.03), VerifierShape(0.03)),
        sources=(),
        ahead_s=(0.0, 0.0),
        conversations=((0.0, turns), (0.0, (turn("good", seed=11),))),
        faults=(),
    )
    return simulate(1, plan=plan)


@pytest.mark.parametrize("asleep_s", [2.0, 14.0, HOUR_S])
def test_a_device_that_sleeps_and_returns_gets_the_rest_of_its_answer(asleep_s: float) -> None:
    found = outcome(turn("useless", "sleep", asleep_s=asleep_s))
    assert found.violations == []
    assert found.counts["answers"] == 2
    assert found.counts["streams"] == (2 if asleep_s < 12 else 3), "servers give a device up after 12 s"


@pytest.mark.parametrize("seed", range(6))
def test_a_device_that_resumes_twice_at_once_is_answered(seed: int) -> None:
    found = outcome(turn("good", "twice", seed=seed))
    assert found.violations == []
    assert found.counts["answers"] >= 2, "the other client's, and one of the two"
    assert found.counts["streams"] >= 4


def test_nothing_is_kept_for_a_device_that_vanishes() -> None:
    found = outcome(turn("good", "vanish"))
    assert found.violations == []
    assert found.counts["answers"] == 1, "the other client's"


def test_old_windows_are_paid_for_like_new_ones() -> None:
    found = outcome(turn("replaying"))
    assert found.violations == []
    assert found.counts["device's nodes"] > found.counts["device's nodes sent on"] > 0


def test_a_device_that_claims_another_session_reaches_none() -> None:
    found = outcome(turn("claiming"), turn("claiming", seed=8))
    assert found.violations == []
    assert found.counts["answers"] == 3


@pytest.mark.parametrize(
    ("bug", "device", "act"),
    [
        ("credits_unlimited", "replaying", "nothing"),
        ("old_windows_cost_nothing", "claiming", "nothing"),
        ("claims_believed", "claiming", "nothing"),
        ("vanished_device_kept", "good", "vanish"),
    ],
)
def test_each_of_these_faults_shows_a_bug(bug: str, device: str, act: str) -> None:
    with planted(bug):
        assert outcome(turn(device, act)).violations


def test_plans_have_all_of_these_devices() -> None:
    turns = [it for seed in range(2000) for _, turns in plan_of(seed).conversations for it in turns]
    assert {"replaying", "claiming", "hostile", "good", "useless"} <= {it.device for it in turns}
    assert {"sleep", "twice", "vanish"} <= {it.act for it in turns}
    assert HOUR_S in {it.asleep_s for it in turns}
    assert all(it.device for it in turns if it.act in {"sleep", "twice", "vanish"})
