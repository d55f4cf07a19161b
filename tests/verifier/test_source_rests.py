"""A source outside the worker is followed while it gains more than it costs: answers on a virtual clock.

The sessions' own rules decide (`SessionSources`, `PresenceTrials`). Only the machine is made up: how long
steps take with the source and without, and which tokens it drafts.
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from outrider.wire.codec import SessionKey
from speculative.marginal import DraftedPlace
from speculative.params import SamplingParams
from verifier_service.engine.session_sources import RoundScore, SessionSources
from verifier_service.engine.source_policy import Reputations
from verifier_service.observe.round_log import Rest, SourceState
from verifier_service.remote_sources.source_presence import PresenceTrials
from verifier_service.remote_sources.source_rests import SourceActivity, SourceThrottle
from verifier_service.remote_sources.sources_at_address import SourcesAtAddress
from verifier_service.sessions.request import SessionRequest, SourceSet

STEP_S = 0.005
NOISE = 0.15
"""Spread of a step's time: steps of a few milliseconds on a machine that does other work as well."""
TOKENS = 100
SEEDS = range(12)
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)


@dataclass(frozen=True)
class Answer:
    """How one answer went."""

    over_plain: float
    """Speed over that of the same tokens without the source."""
    followed: tuple[bool, ...]
    """Whether the source was sent each round."""


@dataclass
class Worker:
    """Answers one request after another, with sources at one address that slow steps down by a factor."""

    slowdown: float
    seed: int
    names: tuple[str, ...] = ("drafter",)
    reputations: Reputations = field(default_factory=Reputations)
    trials: PresenceTrials = field(default_factory=PresenceTrials)
    drafts: bool = True
    """Whether the source drafts anything at all."""
    others: int = 0
    """Tokens that a source inside the worker gets right in each round."""
    now_s: float = 1.0
    steps: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def answer(
        self, gain: float, params: SamplingParams = SAMPLED, tokens: int = TOKENS, by: int = 1
    ) -> Answer:
        """Decodes an answer of which source `by` drafts `gain` tokens a round while it is followed."""
        indices = frozenset(range(1, len(self.names) + 1))
        request = SessionRequest(
            SessionKey("", "s", 0), 1, (1, 2, 3), 3, 4096, params, 1, (), None, 16, sources=()
        )
        sources = SessionSources(request, self.reputations)
        inside = frozenset({len(self.names) + 1})
        sources.use(SourceSet((*self.names, "lookup"), inside, indices, (indices,)))
        self.trials.idle()
        began_s, made, followed, late = self.now_s, 0, list[bool](), 2
        while made < tokens:
            follows = not indices <= sources.resting
            assert follows == indices.isdisjoint(sources.resting), "those at one address rest together"
            # One step behind the last one followed, the source still computes; it has to catch up later on.
            works = follows or followed[-1:] == [True]
            late = max(0, late - 1) if follows else 1
            self._step(sources, self.slowdown if works else 1.0)
            right = self._right(gain) if follows and not late else 0
            made += right + self.others + 1
            self._commit(sources, by, right, heard=self.drafts and follows and not late)
            followed.append(follows)
        rounds_without = made - self.others * len(followed)
        return Answer(STEP_S * rounds_without / (self.now_s - began_s), tuple(followed))

    def _step(self, sources: SessionSources, factor: float) -> None:
        uses = list(sources.uses)
        self.now_s += STEP_S * factor * self.chance.lognormvariate(-(NOISE**2) / 2, NOISE)
        self.trials.stepped(self.now_s, 1, uses, 4.0)
        self.steps += 1

    def _right(self, gain: float) -> int:
        right = 0
        while right < 8 and self.chance.random() < gain / (1 + gain):
            right += 1
        return right

    def _commit(self, sources: SessionSources, by: int, right: int, *, heard: bool) -> None:
        inside = len(self.names) + 1
        token_sources = bytes([by] * right + [inside] * self.others + [0])
        places = [DraftedPlace((source,), (source,)) for source in token_sources[:-1]]
        if heard:
            sources.heard(by)
            places.append(DraftedPlace((by,), ()))
        scored = RoundScore(places, {(by,): right + heard}, node_cost=0.1)
        sources.committed(
            [7] * len(token_sources), token_sources, scored, spared=False, batch=1, step=self.steps
        )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def speeds(slowdown: float, gain: float, answers: int = 8) -> list[float]:
    """Mean speed over plain of each of the first answers of a worker."""
    workers = [Worker(slowdown, seed) for seed in SEEDS]
    by_worker = [[worker.answer(gain).over_plain for _ in range(answers)] for worker in workers]
    return [mean([each[number] for each in by_worker]) for number in range(answers)]


@pytest.mark.parametrize("slowdown", [1.1, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("gain", [0.0, 0.05])
def test_a_source_that_only_slows_answers_down_costs_the_first_little_and_later_ones_less(
    slowdown: float, gain: float
) -> None:
    first, *later = speeds(slowdown, gain)
    lost = 1 - 1 / slowdown
    assert first > 1 - 0.3 * lost
    assert mean(later) > 1 - 0.12 * lost


@pytest.mark.parametrize(("slowdown", "gain"), [(1.0, 0.5), (1.1, 0.7), (1.3, 1.5), (1.5, 3.0)])
def test_a_source_that_gains_far_more_than_it_costs_gains_nearly_all_of_that(
    slowdown: float, gain: float
) -> None:
    always = (1 + gain) / slowdown
    assert mean(speeds(slowdown, gain)) - 1 > 0.75 * (always - 1)


@pytest.mark.parametrize("slowdown", [1.0, 1.2, 1.5])
@pytest.mark.parametrize("gain", [0.1, 0.2, 0.4, 0.8])
def test_no_source_makes_answers_much_slower_whatever_it_gains(slowdown: float, gain: float) -> None:
    first, *later = speeds(slowdown, gain)
    assert first > 0.88
    assert mean(later) > 0.95


def test_a_token_saves_a_round_however_many_tokens_others_add_to_it() -> None:
    """Half a token a round saves a third of the rounds, and is a twelfth of the tokens."""
    workers = [Worker(1.15, seed, others=5) for seed in SEEDS]
    answers = [worker.answer(0.5, tokens=600) for worker in workers for _ in range(4)]
    assert mean([answer.over_plain for answer in answers]) > 1.15


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_that_takes_a_third_of_the_speed_rests_within_thirty_steps(seed: int) -> None:
    assert sum(Worker(1.5, seed).answer(0.0).followed[:30]) <= 16
    assert not Worker(1.5, seed).answer(0.0).followed[29]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_that_never_drafts_costs_later_answers_next_to_nothing(seed: int) -> None:
    worker = Worker(1.2, seed, drafts=False)
    first = worker.answer(0.0)
    later = [worker.answer(0.0).over_plain for _ in range(8)]
    assert first.over_plain > 0.9
    assert mean(later) > 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_followed_again_when_the_text_changes(seed: int) -> None:
    worker = Worker(1.3, seed)
    for _ in range(4):
        worker.answer(0.0)
    found = worker.answer(3.0, tokens=3000).followed
    assert sum(found[:800]) > 100
    assert sum(found[-100:]) > 90


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_answers_keep_a_source_that_sampled_answers_do_without(seed: int) -> None:
    worker = Worker(1.3, seed)
    greedy, sampled = [], []
    for _ in range(6):
        greedy += worker.answer(3.0, GREEDY).followed
        sampled += worker.answer(0.0, SAMPLED).followed
    assert sum(greedy) > 0.7 * len(greedy)
    assert sum(sampled[60:]) < 0.15 * len(sampled[60:])


def test_the_first_answer_of_a_kind_profits_from_what_answers_of_another_kind_found() -> None:
    def first_sampled(warm: bool) -> float:
        workers = [Worker(1.5, seed) for seed in SEEDS]
        for worker in workers if warm else []:
            worker.answer(2.0, GREEDY)
        return mean([worker.answer(0.1, SAMPLED).over_plain for worker in workers])

    assert first_sampled(warm=True) > first_sampled(warm=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_one_of_two_names_gains_pays_for_the_address_of_both(seed: int) -> None:
    worker = Worker(1.15, seed, ("corpus", "past"))
    answers = [worker.answer(2.0, by=number % 2 + 1) for number in range(6)]
    followed = [each for answer in answers for each in answer.followed]
    assert sum(followed) > 0.75 * len(followed)


def test_an_address_says_why_its_sources_are_left_alone() -> None:
    address = SourcesAtAddress(("drafter",), Reputations().of_address(["drafter"], SAMPLED))
    address.indices.add(1)
    assert address.rest(paused=False) is Rest.NONE
    assert address.rest(paused=True) is Rest.COMPARED
    for spared, why in ((False, Rest.GAINS_TOO_LITTLE), (True, Rest.NOT_ADMITTED)):
        while not address.throttle.resting:
            address.throttle.committed(0.0, spared=spared, batch=4)
        assert address.rest(paused=False) is why
        while address.throttle.resting:
            address.throttle.committed(0.0, batch=4)


def test_how_sources_stand_is_one_object_until_one_of_them_rests_or_is_muted() -> None:
    request = SessionRequest(SessionKey("", "s", 0), 1, (1, 2), 2, 99, SAMPLED, 1, (), None, 16, sources=())
    sources, both = SessionSources(request, Reputations()), frozenset({1, 2})
    sources.use(SourceSet(("corpus", "past"), frozenset(), both, (both,)))
    at_first = sources.standing(1)
    assert at_first.states == (SourceState(1, Rest.NONE, None), SourceState(2, Rest.NONE, None))
    assert at_first.resting == sources.resting == frozenset()
    rounds = 0
    while sources.standing(1) is at_first:
        sources.heard(1)
        sources.committed([7], b"\0", RoundScore([], {}), spared=False, batch=1, step=(rounds := rounds + 1))
    assert sources.standing(1).resting == sources.resting == both
    assert {state.rest for state in sources.standing(1).states} == {Rest.GAINS_TOO_LITTLE}
    sources.mute(2)
    assert sources.standing(1).states == (SourceState(1, Rest.GAINS_TOO_LITTLE, None),)


@pytest.mark.parametrize("seed", SEEDS)
def test_trials_of_a_source_that_stays_useless_get_rare(seed: int) -> None:
    worker = Worker(1.3, seed)
    followed = [each for _ in range(20) for each in worker.answer(0.0).followed]
    begun = [not before and after for before, after in pairwise(followed)]
    assert sum(begun[:500]) >= sum(begun[-500:]) <= 5
    assert sum(followed[-1000:]) < 60


def test_a_round_of_a_rest_that_brings_nothing_counts_alike_by_the_short_way() -> None:
    fates = []
    for is_short in (False, True):
        activity = SourceActivity()
        throttles = [SourceThrottle(activity) for _ in range(3)]
        fate = []
        for step in range(1, 400):
            for throttle in throttles:
                if throttle.resting and is_short:
                    throttle.rested(len(throttles), step)
                else:
                    throttle.committed(0.0, heard=False, batch=len(throttles), step=step)
                fate.append(throttle.resting)
        fates.append((fate, activity))
    assert fates[0] == fates[1]
    assert {True, False} == set(fates[0][0][600:]), "rests begin and end"
