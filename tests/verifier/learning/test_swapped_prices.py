"""What calls to the weights before a swap took says nothing of the weights after: these are judged afresh."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from core_driver import CoreDriver

from verifier_service.engine.messages import SwapProposer
from verifier_service.engine.stats import Unmeasured
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import DraftAsk, DraftLevel, ProposedSession, ProposerNeeds, SeenPass
from verifier_service.proposers.host import WARM_STEPS
from verifier_service.proposers.hosted import SLOW_CALLS, SLOW_S

NEW = 400


class Clock(Unmeasured):
    """A meter whose time passes when a proposer says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now_s(self) -> float:
        return self.time


class Wrong:
    """Drafts one token that is never right; its first calls take `slow_s`, the others `call_s`."""

    needs = ProposerNeeds(tops=2)

    def __init__(self, clock: Clock, call_s: float = 0.0, slow_calls: int = 0, slow_s: float = 0.0) -> None:
        self._clock = clock
        self._call_s = call_s
        self._slow_calls = slow_calls
        self._slow_s = slow_s
        self.asked = 0
        self.shown = 0

    def open(self, session: ProposedSession) -> None:
        pass

    def saw(self, seen: SeenPass) -> None:
        assert all(shown.said is not None and shown.said.tops for shown in seen.rounds)
        self.shown += len(seen.rounds)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        self.asked += 1
        self._clock.time += self._slow_s if self.asked <= self._slow_calls else self._call_s
        yield [DraftLevel((0,), (-1,), (0.1,)) for _ in asks]

    def close(self, handle: int) -> None:
        pass


def driver_of(proposer: Wrong, clock: Clock, adaptive: bool) -> CoreDriver:
    costs = StepCostModel({1: 20.0, 64: 83.0})
    driver = CoreDriver(None, {"bigram": proposer}, clock, costs, adaptive=adaptive)
    driver.open(new=NEW, sources=("bigram",))
    return driver


def swap(driver: CoreDriver, proposer: Wrong) -> None:
    swapped = SwapProposer("bigram", proposer, Future())
    driver.core.apply(swapped, driver.now)
    swapped.before.result(0)


def test_new_weights_are_asked_and_shown_passes_at_once_where_those_before_rest() -> None:
    clock = Clock()
    dear, after = Wrong(clock, call_s=0.05), Wrong(clock)
    driver = driver_of(dear, clock, adaptive=True)
    (hosted,) = driver.core.proposers._hosted
    while not (hosted.looks_away and hosted.prices.rest_left > 2 * WARM_STEPS):
        assert driver.step(), "the proposer rests"
    asked, shown = dear.asked, dear.shown
    driver.step()
    assert (dear.asked, dear.shown) == (asked, shown)
    swap(driver, after)
    driver.step()
    assert (after.asked, after.shown) == (1, 1)


def test_slow_calls_to_the_weights_before_mute_no_new_weights() -> None:
    clock = Clock()
    slow = [Wrong(clock, slow_calls=SLOW_CALLS - 1, slow_s=2 * SLOW_S) for _ in range(3)]
    driver = driver_of(slow[0], clock, adaptive=False)
    for after in slow[1:]:
        for _ in range(SLOW_CALLS):
            driver.step()
        swap(driver, after)
    for _ in range(SLOW_CALLS):
        driver.step()
    assert not driver.core.proposers.muted
    assert [one.asked for one in slow] == [SLOW_CALLS] * 3
