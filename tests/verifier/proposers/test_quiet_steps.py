"""Steps in which all proposers rest are only counted: what is drafted, and when, stays the same."""

import pytest
from core_driver import CoreDriver

from tests.verifier.proposers.test_batched import LONG, Clock, Drafting
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import DraftLevel, ProposedSession
from verifier_service.proposers.host import ProposerHost
from verifier_service.proposers.price import ProposerPrice
from verifier_service.proposers.quiet_steps import QuietSteps


def resting(steps: int) -> ProposerPrice:
    price = ProposerPrice()
    price._trials.rest = steps
    return price


def test_quiet_steps_end_a_margin_before_the_first_rest_does() -> None:
    quiet, prices = QuietSteps(), [resting(50), resting(40)]
    quiet.plan(prices, margin=10)
    taken = 0
    while quiet.begin_step(is_same=True):
        assert quiet.has_step()
        taken += 1
    assert taken == 30
    assert [price.rest_left for price in prices] == [20, 10]
    assert not quiet.has_step()


def test_other_sessions_end_the_quiet_steps_and_steps_that_draft_nothing_do_not_count() -> None:
    quiet, price = QuietSteps(), resting(50)
    quiet.plan([price], margin=10)
    for _ in range(3):
        assert quiet.begin_step(is_same=True)
        quiet.has_step()
    assert quiet.begin_step(is_same=True)  # its sessions only read prompts
    assert not quiet.begin_step(is_same=False)
    assert price.rest_left == 47
    assert not quiet.begin_step(is_same=True), "until the next plan"


def test_a_step_may_end_the_quiet_steps_and_is_none_itself() -> None:
    quiet, price = QuietSteps(), resting(50)
    quiet.plan([price], margin=10)
    assert quiet.begin_step(is_same=True)
    assert quiet.has_step()
    assert quiet.begin_step(is_same=True)
    quiet.end()
    assert not quiet.has_step()
    assert price.rest_left == 49


class Useless(Drafting):
    """Drafts wrong tokens at a high price, and notes where."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked_at: list[int] = []

    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        self.clock.time += 0.01
        place = len(session.ids) - session.prompt_length
        if depth or place >= len(LONG):
            return None
        self.asked_at.append(place)
        return DraftLevel(((LONG[place] + 1) % 24,), (-1,), (0.1,))


def asked_at() -> tuple[list[list[int]], int]:
    """Places at which two proposers that never pay were asked, and how often the host drafted."""
    clock = Clock()
    proposers = {"one": Useless(clock), "other": Useless(clock)}
    costs = StepCostModel({1: 20.0, 64: 83.0})
    driver = CoreDriver(proposers=proposers, meter=clock, costs=costs, adaptive=True)
    calls = 0
    draft = ProposerHost.draft

    def counted(*given: object) -> None:
        nonlocal calls
        calls += 1
        draft(*given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProposerHost, "draft", counted)
        session = driver.open((1, 2, 3), len(LONG), sources=tuple(proposers))
        driver.run()
    assert driver.generated(session) == LONG
    return [proposer.asked_at for proposer in proposers.values()], calls


def test_a_proposer_is_asked_in_the_same_steps_with_and_without_quiet_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places, calls = asked_at()
    monkeypatch.setattr(QuietSteps, "plan", lambda *_: None)
    places_without, calls_without = asked_at()
    assert places == places_without
    assert calls < 0.7 * calls_without
