"""Several drafters on one session: what each adds decides how much of the verifier's time it gets.

The drafters are scripted, so that the only question is what the engine does with them. Time is virtual, so
`pytest -rP` prints the same figures on every machine.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from ngram_lm import NgramLM

from speculative.fragment import Fragment
from speculative.params import SamplingParams
from verifier_service.engine.messages import InFlight, Offers
from verifier_service.engine.session import Session
from verifier_service.engine.stats import Unmeasured
from verifier_service.engine.step_cost import StepCostModel

VOCABULARY = 32
NEW = 1500
MS = {1: 20.0, 8: 23.0, 64: 60.0}
"""Milliseconds of a step, by rows."""

Drafts = Callable[[Sequence[int]], Sequence[int]]
"""The chain that a drafter drafts below these tokens."""


class VirtualTime(Unmeasured):
    """A meter of the time that the engine's steps take."""

    def __init__(self) -> None:
        self.seconds = 1.0

    def now_s(self) -> float:
        return self.seconds


class Run:
    """One request, decoded with these drafters.

    `slows` says, by a drafter's place, how many times as long steps take while it is followed; without it
    the engine measures nothing.
    """

    def __init__(
        self,
        drafters: Sequence[Drafts],
        params: SamplingParams = GREEDY,
        new: int = NEW,
        slows: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        target = NgramLM(VOCABULARY, max_length=4096)
        self._slows, self._costs, self._time = slows, StepCostModel(MS), VirtualTime()
        meter = self._time if slows else None
        self.driver = CoreDriver(target, meter=meter, costs=StepCostModel(MS), adaptive=True)
        self.names = [f"drafter-{place}" for place in range(len(drafters))]
        self.session = self.driver.open(new=new, params=params, seed=3, remote=self.names)
        self.sent = [0] * len(drafters)
        self.admitted_by = [[0] * len(drafters)]
        """Nodes of each drafter that were admitted up to each round."""
        self.step_ms: list[float] = []
        while self._step(drafters):
            pass
        self.ms = sum(self.step_ms)
        self.ids = self.driver.generated(self.session)

    def _step(self, drafters: Sequence[Drafts]) -> bool:
        session = self.session
        for index, draft in enumerate(drafters, start=1):
            if (
                self.driver.core.sessions.get(session.handle) is session
                and index not in session.sources.resting
            ):
                self.sent[index - 1] += 1
                offer(self.driver, session, index, draft(session.ids))
        self.admitted_by.append([self.admitted(place) for place in range(len(drafters))])
        return self.driver.step(self._pass_time)

    def _pass_time(self) -> None:
        ms = self._costs.expected_ms(self.driver.passes[-1].rows)
        for place, factor in self._slows.items():
            ms *= 1.0 if place + 1 in self.session.sources.resting else factor
        self.step_ms.append(ms)
        self._time.seconds += ms / 1000

    def admitted(self, place: int) -> int:
        return self.driver.core.counts[self.names[place]].admitted

    def own(self, place: int) -> int:
        return self.driver.core.counts[self.names[place]].own

    @property
    def rounds(self) -> int:
        return len(self.driver.passes)


def offer(driver: CoreDriver, session: Session, index: int, tokens: Sequence[int]) -> None:
    fragment = Fragment(
        index,
        1,
        len(session.ids),
        session.prefix_hash,
        tuple(tokens),
        tuple(range(-1, len(tokens) - 1)),
        tuple(0.8 ** (depth + 1) for depth in range(len(tokens))),
    )
    driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(1)), driver.now)


def truth(params: SamplingParams = GREEDY, new: int = NEW) -> list[int]:
    return Run((), params, new).ids


def knowing(ids: Sequence[int], right: float, seed: int, ahead: int = 4) -> Drafts:
    """Drafts `ahead` tokens, each of which is the request's own with the probability `right`."""
    whole = [1, 2, 3, *ids]

    def draft(prefix: Sequence[int]) -> list[int]:
        rng = Random(seed * NEW + len(prefix))
        true = [*whole[len(prefix) : len(prefix) + ahead], *[0] * ahead][:ahead]
        return [token if rng.random() < right else (token + 1) % VOCABULARY for token in true]

    return draft


def guessing(seed: int, ahead: int = 4) -> Drafts:
    rng = Random(seed)
    return lambda prefix: [rng.randrange(VOCABULARY) for _ in range(ahead)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_ids_are_those_of_plain_decoding_whatever_the_drafters_add(params: SamplingParams) -> None:
    plain = truth(params, 300)
    both = Run((knowing(plain, 0.8, 1), knowing(plain, 0.5, 2)), params, 300)
    assert both.ids == plain
    assert both.rounds < 0.5 * len(plain)


def test_two_drafters_that_know_different_parts_are_worth_more_than_the_better_one() -> None:
    plain = truth()
    halves = [knowing(plain, 0.7, 1), knowing(plain, 0.7, 2)]
    alone, both = Run(halves[:1]), Run(halves)
    print(f"two that know different parts take {both.ms / alone.ms:.2f} of the time of one")
    assert both.ms < 0.9 * alone.ms
    assert min(both.own(0), both.own(1)) > 50
    assert both.sent[1] > 0.95 * both.rounds, "neither rests"


def test_a_useless_second_drafter_is_hardly_asked_and_costs_three_percent_at_most() -> None:
    plain = truth()
    alone = Run((knowing(plain, 0.8, 1),))
    both = Run((knowing(plain, 0.8, 1), guessing(2)))
    nodes, early = both.admitted(1), both.admitted_by[50][1]
    print(f"guesses are {nodes} of {nodes + both.admitted(0)} verified nodes, {early} in the first 50 rounds")
    print(f"sent {both.sent[1]} of {both.rounds} rounds; steps take {both.ms / alone.ms - 1:.1%} longer")
    assert both.ids == plain
    assert both.ms < 1.03 * alone.ms
    assert both.admitted(1) < 0.05 * both.admitted(0)
    late = both.admitted(1) - both.admitted_by[both.rounds // 2][1]
    assert late < 0.01 * both.admitted(0), "it is learnt soon that they are wrong"
    assert both.sent[1] < 0.25 * both.rounds
    assert both.sent[0] > 0.95 * both.rounds


def test_it_makes_no_difference_which_of_the_two_is_the_useless_one() -> None:
    plain = truth()
    both = Run((guessing(2), knowing(plain, 0.8, 1)))
    assert both.sent[0] < 0.25 * both.rounds
    assert both.sent[1] > 0.95 * both.rounds


def test_of_two_drafters_that_draft_the_same_one_rests() -> None:
    plain = truth()
    both = Run((knowing(plain, 0.8, 1), knowing(plain, 0.8, 1)))
    print(f"of two that are equal, one is sent {min(both.sent) / both.rounds:.0%} of the rounds")
    assert min(both.sent) < 0.4 * both.rounds
    assert max(both.sent) > 0.95 * both.rounds


def test_no_step_waits_for_a_drafter_that_adds_nothing() -> None:
    plain = truth(new=300)
    run = Run((knowing(plain, 0.8, 1), guessing(2)), new=300)
    first, second = (run.session.sources.latencies[index] for index in (1, 2))
    assert first.acceptance > 0.5
    assert second.acceptance < 0.05


def test_a_second_drafter_that_becomes_useful_is_found_out() -> None:
    plain = truth()
    useful, useless = knowing(plain, 1.0, 2), guessing(2)
    both = Run((knowing(plain, 0.6, 1), lambda ids: (useful if len(ids) > NEW // 2 else useless)(ids)))
    assert both.own(1) > 100


def test_a_drafter_that_costs_the_target_more_than_it_gains_comes_to_rest() -> None:
    plain = truth()
    both = (knowing(plain, 0.8, 1), knowing(plain, 0.6, 2))
    dear, cheap = Run(both, slows={0: 1.0, 1: 2.0}), Run(both, slows={0: 1.0, 1: 1.0})
    alone = Run(both[:1])
    assert dear.ids == cheap.ids == plain
    later = dear.step_ms[dear.rounds // 2 :]
    assert sum(ms > 35.0 for ms in later) < 0.2 * len(later), "steps take 20 to 27 ms without it"
    assert cheap.sent[1] > 0.7 * cheap.rounds, "where it costs nothing, it pays"
    assert cheap.ms < 0.98 * alone.ms
    assert dear.sent[0] > 0.9 * dear.rounds, "the other one is not blamed"


def test_a_drafter_that_gains_more_than_it_costs_the_target_is_followed() -> None:
    plain = truth()
    run = Run((knowing(plain, 0.9, 1),), slows={0: 1.5})
    assert run.ids == plain
    assert run.sent[0] > 0.9 * run.rounds
    assert run.ms < 0.7 * Run(()).ms
