"""A Cancel once ended another request than its own, or not all of its own: scenarios by their seed."""

import pytest

from benchmarks.simulation.network import Weather
from benchmarks.simulation.plan import Fault, Plan, Turn
from benchmarks.simulation.verifier import VerifierShape
from benchmarks.simulation.world import simulate
from verifier_service.sessions.manager import SessionManager


@pytest.mark.parametrize("seed", [5189, 14946, 32747, 45571])
def test_a_cancel_is_not_taken_for_one_of_the_session_s_next_request(seed: int) -> None:
    """A slower clock placed that one where nobody had heard of the epoch that the Cancel names."""
    assert simulate(seed).violations == []


@pytest.mark.parametrize("seed", range(20))
def test_nor_where_the_store_was_away_when_that_one_began(seed: int) -> None:
    """So it could not be placed above the record, and its own was refused; its client goes on elsewhere."""

    def turn(act: str, first: int, most: int) -> Turn:
        return Turn((1, 2, 3), most, 1, first, first, None, False, False, act, 0.2, 0.3, False)

    plan = Plan(
        seed=seed,
        weather=Weather(0.002),
        verifiers=(VerifierShape(0.03), VerifierShape(0.03)),
        sources=(),
        ahead_s=(0.0, 3600.0),
        conversations=((0.0, (turn("cancel", 1, 120), turn("nothing", 0, 40))),),
        faults=(
            Fault(0.3, "kill verifier", 0, 0.05),
            Fault(0.35, "freeze store", 0, 0.5),
            Fault(1.3, "break", 0, 0.1),
        ),
    )
    assert simulate(seed, plan=plan).violations == []


@pytest.mark.parametrize("seed", [4020, 4502, 4762])
def test_a_cancel_holds_where_a_request_is_placed_again_before_it_runs(seed: int) -> None:
    """One verifier takes a choice and is gone; meanwhile the Cancel comes by the other orchestrator."""
    turn = Turn((1, 2, 3), 150, 2, seed, 0, None, False, False, "cancel", 0.01 + seed % 60 / 1000, 0.3, False)
    plan = Plan(
        seed=seed,
        weather=Weather(0.002, late=0.3, late_s=0.1),
        verifiers=(VerifierShape(0.03), VerifierShape(0.03)),
        sources=(),
        ahead_s=(0.0, 0.0),
        conversations=((0.2, (turn,)),),
        faults=(Fault(0.205 + seed // 60 % 10 / 200, "kill verifier", 0, 0.05),),
    )
    assert simulate(seed, plan=plan).violations == []


def test_a_cancelled_request_may_wait_for_the_only_verifier_to_come_back() -> None:
    """It was frozen while it stopped, so it was back later than its plan says."""
    assert simulate(36674).violations == []


@pytest.mark.parametrize("seed", range(4))
def test_a_verifier_that_ignores_cancels_is_found_where_nothing_goes_wrong(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionManager, "cancel", lambda self, key, epoch: True)
    turn = Turn((1, 2, 3), 200, 1, 1, 0, None, False, False, "cancel", 0.1, 0.0, False)
    plan = Plan(seed, Weather(0.005), (VerifierShape(0.05),), (), (0.0, 0.0), ((0.0, (turn,)),), ())
    assert any("after a Cancel that was answered" in what for what in simulate(seed, plan=plan).violations)


def test_a_cancel_that_overtakes_a_choice_s_open_ends_that_choice_too() -> None:
    assert simulate(56708).violations == []
