"""Batched proposers: whatever one does, ids equal plain decoding, and one that does harm is muted."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core_driver import GREEDY, SAMPLED, CoreDriver
from ngram_lm import NgramLM

from outrider.runtime.stalls.awake_clock import AwakeClock
from speculative.params import SamplingParams
from verifier_service.engine.stats import Unmeasured
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    SeenPass,
)
from verifier_service.proposers.host import COMPARED_STEPS, WARM_STEPS
from verifier_service.proposers.hosted import JUDGED_CALLS, SLOW_CALLS
from verifier_service.proposers.measured_gain import MeasuredGain

NEW = 24
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2)
REQUESTS = [((1, 2, 3), GREEDY), ((4, 5), SAMPLED), ((6, 7, 8, 9), PENALISED)]


class Clock(Unmeasured):
    """A meter whose time passes when a proposer says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now_s(self) -> float:
        return self.time


def decoded(proposer: Any = None, meter: Clock | None = None) -> tuple[list[list[int]], CoreDriver]:
    driver = CoreDriver(proposers={"bigram": proposer} if proposer else {}, meter=meter)
    sources = ("bigram", "lookup") if proposer else ()
    sessions = [
        driver.open(prompt, NEW, params, seed=at, sources=sources)
        for at, (prompt, params) in enumerate(REQUESTS)
    ]
    driver.run()
    return [driver.generated(session) for session in sessions], driver


PLAIN = decoded()[0]


def long_answer() -> list[int]:
    driver = CoreDriver()
    session = driver.open((1, 2, 3), 400)
    driver.run()
    return driver.generated(session)


LONG = long_answer()


class Drafting:
    """Drafts a chain of what `following` says comes next, one token a level."""

    needs = ProposerNeeds(tops=2)

    def __init__(self, clock: Clock | None = None) -> None:
        self.sessions: dict[int, ProposedSession] = {}
        self.closed: list[int] = []
        self.levels = 0
        self.calls = 0
        self.clock = clock or Clock()

    def open(self, session: ProposedSession) -> None:
        assert session.handle not in self.sessions
        self.sessions[session.handle] = session

    def close(self, handle: int) -> None:
        del self.sessions[handle]
        self.closed.append(handle)

    def saw(self, seen: SeenPass) -> None:
        for shown in seen.rounds:
            ids = self.sessions[shown.handle].ids
            assert tuple(ids[shown.position : shown.position + len(shown.tokens)]) == shown.tokens
            assert shown.said is not None
            assert len(shown.said.tops) == len(shown.tokens)
            assert shown.first + len(shown.rows) == len(ids) - 1, "all but the last token is computed"

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        self.calls += 1
        for depth in range(4):
            self.levels += 1
            yield [self.level(self.sessions[ask.handle], depth) for ask in asks]

    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        token = self.following(session, len(session.ids) - session.prompt_length + depth)
        return None if token is None else DraftLevel((token,), (depth - 1,), (0.9 ** (depth + 1),))

    def following(self, session: ProposedSession, place: int) -> int | None:
        answer = PLAIN[session.handle - 1]
        return answer[place] if place < len(answer) else None


class Random(Drafting):
    def __init__(self) -> None:
        super().__init__()
        self._chance = np.random.default_rng(0)

    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        tokens = tuple(self._chance.choice(24, 2, replace=False).tolist())
        above = -1 if depth == 0 else 2 * depth - 1 - int(self._chance.integers(2))
        return DraftLevel(tokens, (above, above), (0.6 ** (depth + 1),) * 2)


class NotANumber(Drafting):
    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        return DraftLevel((1,), (depth - 1,), (math.nan,))


class NoId(Drafting):
    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        return DraftLevel((24,), (depth - 1,), (0.5,))


class NoTree(Drafting):
    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        return DraftLevel((1,), (depth,), (0.5,))


class TooFew(Drafting):
    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        yield [None] * (len(asks) + 1)


class RaisesAtOnce(Drafting):
    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        raise RuntimeError("CUDA error: out of memory")


class DiesAmidAStep(Drafting):
    """Drafts well, and fails when the third pass with these drafts is shown."""

    def saw(self, seen: SeenPass) -> None:
        if self.calls == 3:
            raise ValueError("a head died")
        super().saw(seen)


class DiesAmidADraft(Drafting):
    def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
        if self.calls == 3 and depth == 2:
            raise ValueError("a head died")
        return super().level(session, depth)


class RaisesWhenOpened(Drafting):
    def open(self, session: ProposedSession) -> None:
        raise KeyError(session.handle)


class RaisesWhenClosed(Drafting):
    def close(self, handle: int) -> None:
        raise KeyError(handle)


@pytest.mark.parametrize("make", [Drafting, Random])
def test_ids_equal_plain_decoding_with_a_proposer_that_is(make: Callable[[], Drafting]) -> None:
    proposer = make()
    ids, driver = decoded(proposer)
    assert ids == PLAIN
    assert not driver.core.proposers.muted
    driver.core.begin(driver.now)
    assert proposer.sessions == {}
    assert sorted(proposer.closed) == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (NotANumber, "nan"),
        (NoId, "id 24"),
        (NoTree, "precedes"),
        (TooFew, "4 entries for 3 sessions"),
        (RaisesAtOnce, "out of memory"),
        (DiesAmidAStep, "a head died"),
        (DiesAmidADraft, "a head died"),
        (RaisesWhenOpened, "KeyError"),
        (RaisesWhenClosed, "KeyError"),
    ],
)
def test_one_that_fails_is_muted_for_the_worker_and_no_session_notices(
    make: Callable[[], Drafting], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = make()
    ids, driver = decoded(proposer)
    assert ids == PLAIN
    driver.core.begin(driver.now)
    assert why in driver.core.proposers.muted["bigram"]
    assert caplog.text.count("proposer muted") == 1
    calls = proposer.calls
    again = driver.open((1, 2, 3), NEW, sources=("bigram",))
    driver.run()
    assert driver.generated(again) == PLAIN[0]
    assert proposer.calls == calls, "nobody calls it again"


def test_a_perfect_one_saves_passes() -> None:
    _, driver = decoded(Drafting())
    assert driver.core.counts["bigram"].accepted > NEW
    assert driver.core.totals.steps < NEW / 2


@pytest.mark.parametrize(("call_s", "calls"), [(0.15, SLOW_CALLS), (1.5, 1)])
def test_one_that_is_slow_is_muted(call_s: float, calls: int) -> None:
    clock = Clock()

    class Slow(Drafting):
        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += call_s
            return super().level(session, depth)

    proposer = Slow(clock)
    ids, driver = decoded(proposer, clock)
    assert ids == PLAIN
    assert "the engine waits" in driver.core.proposers.muted["bigram"]
    assert proposer.levels == calls


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "busy"])
def test_one_that_was_called_while_the_process_stood_still_is_not_muted(is_frozen: bool) -> None:
    clock = Clock()
    worked_s = 0.0
    awake = AwakeClock(clock.now_s, lambda: worked_s)
    awake.beat()

    class Judged(Clock):
        def awake_s(self) -> float:
            return awake.awake_s()

    class Late(Drafting):
        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            nonlocal worked_s
            clock.time += 5.0
            worked_s += 0.0 if is_frozen else 5.0
            return super().level(session, depth)

    ids, driver = decoded(Late(), Judged())
    assert ids == PLAIN
    assert bool(driver.core.proposers.muted) is not is_frozen


def test_a_dear_one_that_drafts_what_a_cheap_one_has_drafted_rests() -> None:
    clock = Clock()

    class Same(Drafting):
        def __init__(self, call_s: float) -> None:
            super().__init__(clock)
            self._call_s = call_s

        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += self._call_s
            return super().level(session, depth)

        def following(self, session: ProposedSession, place: int) -> int | None:
            return LONG[place] if place < len(LONG) else None

    def calls(**proposers: Drafting) -> list[int]:
        driver = CoreDriver(proposers=proposers, meter=clock)
        session = driver.open((1, 2, 3), len(LONG), sources=tuple(proposers))
        driver.run()
        assert driver.generated(session) == LONG
        assert not driver.core.proposers.muted
        return [proposer.calls for proposer in proposers.values()]

    (alone,) = calls(dear=Same(0.002))
    dear, cheap = calls(dear=Same(0.002), cheap=Same(0.0001))
    assert dear < cheap / 2
    assert dear < alone / 2


def test_one_whose_nodes_are_not_worth_their_rows_rests() -> None:
    clock = Clock()

    class Wide(Drafting):
        """Drafts four children, one of which is right."""

        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += 0.0001
            place = len(session.ids) - session.prompt_length
            if depth or place >= len(LONG):
                return None
            return DraftLevel(tuple((LONG[place] + at) % 24 for at in range(4)), (-1,) * 4, (0.25,) * 4)

    def calls(row_ms: float) -> int:
        proposer = Wide(clock)
        costs = StepCostModel({1: 20.0, 2: 20.0 + row_ms, 64: 20.0 + 63 * row_ms})
        driver = CoreDriver(proposers={"wide": proposer}, meter=clock, costs=costs, adaptive=True)
        session = driver.open((1, 2, 3), len(LONG), sources=("wide",))
        driver.run()
        assert driver.generated(session) == LONG
        return proposer.calls

    assert calls(row_ms=9.0) < 40, "a row takes half the time of a token, and yields a quarter of a token"
    assert calls(row_ms=0.5) > 150


def test_one_that_rests_is_shown_nothing_but_the_passes_before_its_next_trial() -> None:
    clock = Clock()
    events: list[str] = []

    class Useless(Drafting):
        """Drafts a wrong token at a high price."""

        def saw(self, seen: SeenPass) -> None:
            super().saw(seen)
            events.append("saw")

        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += 0.01
            place = len(session.ids) - session.prompt_length
            if depth or place >= len(LONG):
                return None
            events.append("asked")
            return DraftLevel(((LONG[place] + 1) % 24,), (-1,), (0.1,))

    costs = StepCostModel({1: 20.0, 64: 83.0})
    driver = CoreDriver(proposers={"useless": Useless(clock)}, meter=clock, costs=costs, adaptive=True)
    session = driver.open((1, 2, 3), len(LONG), sources=("useless",))
    driver.run()
    assert driver.generated(session) == LONG
    shown, asked = events.count("saw"), events.count("asked")
    assert asked < 40
    assert shown < len(LONG) / 3
    before_trials = [len(list(group)) for event, group in itertools.groupby(events) if event == "saw"]
    *rests, _ = [length for length in before_trials if length > 1]  # the answer ends amid the last rest
    assert len(rests) >= 2, "the proposer rested, and was tried again"
    assert min(rests) >= WARM_STEPS


def test_of_a_rest_only_the_last_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticking(Clock):
        """Every look at the time takes a while, so that no step takes none."""

        def now_s(self) -> float:
            self.time += 0.0001
            return self.time

    clock = Ticking()
    compared: list[bool] = []
    learn = MeasuredGain.learn

    def noted(self: MeasuredGain, sessions: int, asked: bool, tokens: int, ms: float) -> None:
        compared.append(asked)
        learn(self, sessions, asked, tokens, ms)

    monkeypatch.setattr(MeasuredGain, "learn", noted)

    class Dear(Drafting):
        """Drafts nothing at a high price."""

        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += 0.01
            return None

    costs = StepCostModel({1: 20.0, 64: 83.0})
    driver = CoreDriver(proposers={"dear": Dear(clock)}, meter=clock, costs=costs, adaptive=True)
    driver.open((1, 2, 3), len(LONG), sources=("dear",))
    driver.run()
    bare = [len(list(group)) for asked, group in itertools.groupby(compared) if not asked]
    # The step that decides on a rest counts as well, and so do steps that leave a proposer on trial out.
    assert COMPARED_STEPS <= max(bare) < 2 * COMPARED_STEPS, "rests take up to 128 steps here"


def test_steps_without_a_proposer_that_it_is_compared_with_do_not_pay_for_showing_it_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    bare_ms: list[float] = []
    learn = MeasuredGain.learn

    def noted(self: MeasuredGain, sessions: int, asked: bool, tokens: int, ms: float) -> None:
        learn(self, sessions, asked, tokens, ms)
        if not asked:
            bare_ms.append(ms)

    monkeypatch.setattr(MeasuredGain, "learn", noted)

    class Seeing(Drafting):
        """Drafts one right token in a millisecond, and takes five to see a pass."""

        def saw(self, seen: SeenPass) -> None:
            super().saw(seen)
            clock.time += 0.005

        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += 0.001
            place = len(session.ids) - session.prompt_length
            return None if depth or place >= len(LONG) else DraftLevel((LONG[place],), (-1,), (0.9,))

    proposer = Seeing(clock)
    costs = StepCostModel({1: 20.0, 64: 21.0})
    driver = CoreDriver(proposers={"seeing": proposer}, meter=clock, costs=costs, adaptive=True)
    forward = driver.target.forward

    def computed(sequences: Any) -> Any:
        clock.time += 0.02
        return forward(sequences)

    driver.target.forward = computed
    session = driver.open((1, 2, 3), len(LONG), sources=("seeing",))
    driver.run()
    assert driver.generated(session) == LONG
    assert proposer.calls > 100, "the proposer pays"
    assert len(bare_ms) > 10
    assert bare_ms == pytest.approx([20.0] * len(bare_ms))


def test_slow_calls_far_apart_mute_nobody() -> None:
    clock = Clock()

    class SeldomSlow(Drafting):
        def level(self, session: ProposedSession, depth: int) -> DraftLevel | None:
            clock.time += 0.15 if self.levels % JUDGED_CALLS == 1 else 0.0
            return super().level(session, depth)

        def following(self, session: ProposedSession, place: int) -> int | None:
            return PLAIN[0][place] if place < NEW else None

    proposer = SeldomSlow(clock)
    driver = CoreDriver(NgramLM(24), proposers={"bigram": proposer}, meter=clock)
    while proposer.levels < SLOW_CALLS * JUDGED_CALLS + 2:
        driver.open((1, 2, 3), NEW, sources=("bigram",))
        driver.run()
    assert not driver.core.proposers.muted


def test_what_a_pass_did_to_a_prompt_is_shown_to_one_that_needs_it() -> None:
    shown = []

    class Reading(Drafting):
        needs = ProposerNeeds(tops=1, layers=(-1,), prompts=True)

        def saw(self, seen: SeenPass) -> None:
            assert seen.features is not None
            for one in seen.rounds:
                ids = self.sessions[one.handle].ids
                shown.append((one.first, seen.features[0, list(one.rows), 0].tolist()))
                assert shown[-1][1] == ids[one.first : one.first + len(one.rows)]

    class Target(NgramLM):
        """Its hidden state at a row is the row's token."""

        def forward(self, sequences: Any) -> Any:
            outcome = super().forward(sequences)
            tokens = [token for sequence in sequences for token in sequence.tokens]
            outcome.features = torch.tensor(tokens, dtype=torch.float64)[None, :, None]
            return outcome

    driver = CoreDriver(Target(24), proposers={"bigram": Reading()}, prefill_chunk=4)
    prompt = tuple(range(1, 12))
    driver.open(prompt, 3, sources=("bigram",))
    driver.run()
    assert not driver.core.proposers.muted
    positions = [first + at for first, tokens in shown for at in range(len(tokens))]
    assert positions == list(range(len(prompt) + 2)), "every position once, in order"
