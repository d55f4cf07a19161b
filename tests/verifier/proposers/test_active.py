"""A session's own proposers are left alone where they gain too little, and tried again."""

from collections.abc import Callable, Sequence

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from harness import serving
from ngram_lm import NgramLM

from outrider.wire.names import GRAMMAR, REFERENCES
from speculative.draft import Draft
from speculative.marginal import SourceGain
from speculative.params import SamplingParams
from speculative.tree import ROOT
from tests.in_time import in_time
from verifier_service.engine.source_policy import Reputation
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.observe.round_log import Rest
from verifier_service.proposers import ProposerInit
from verifier_service.proposers.own_text.active import ActiveProposer, SessionProposers
from verifier_service.proposers.own_text.lookup import MOST_READ
from verifier_service.proposers.own_text.record import SourceRecord
from verifier_service.remote_sources.source_rests import LEAST_PRICE

DRAFT = Draft((7,), (ROOT,), (0.5,))
SLOPED = StepCostModel({rows: 5.0 + 0.25 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)})
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class Recorder:
    """A proposer that drafts one token each time, or nothing, and keeps what it was given."""

    def __init__(self, draft: Draft | None = DRAFT) -> None:
        self.ids: list[int] = []
        self.calls = 0
        self._draft = draft

    def append(self, tokens: Sequence[int]) -> None:
        self.ids += tokens

    def propose(self, node_limit: int) -> Draft | None:
        self.calls += 1
        return self._draft


def known(source: int, estimate: float) -> float:
    """Sources know what their nodes are worth."""
    return estimate


def active(recorder: Recorder | None = None, record: SourceRecord | None = None) -> ActiveProposer:
    return ActiveProposer(1, recorder or Recorder(), record or SourceRecord())


def rounds(
    proposer: ActiveProposer,
    count: int,
    saved: Callable[[int], float] = lambda step: 0.0,
    begin: int = 1,
    *,
    batch: int = 1,
    spared: bool = False,
    least: float = 0.0,
    took_ms: float = 0.0,
    pass_ms: float = 0.0,
) -> list[bool]:
    """Whether each of some rounds, which commit a token each, asked the proposer."""
    asked = []
    for step in range(begin, begin + count):
        asked.append(not proposer.is_resting)
        draft = proposer.propose(list(range(step)), step, 4)
        if draft is not None:
            proposer.holds_back(draft, known, least)
        proposer.took(took_ms, offers=draft is not None)
        gained = saved(step) if asked[-1] else 0.0
        proposer.committed(gained, spared=spared, batch=batch, step=step, right=False, pass_ms=pass_ms)
    return asked


def test_a_proposer_that_saves_nothing_rests_after_32_rounds_for_up_to_64_steps() -> None:
    asked = rounds(active(), 600)
    assert asked[:32] == [True] * 32
    assert asked[32:48] == [False] * 16
    assert asked[48:56] == [True] * 8
    assert asked[56:120] == [False] * 64
    assert asked[120:128] == [True] * 8
    assert asked[128:192] == [False] * 64


def test_rounds_without_a_draft_count_a_quarter() -> None:
    asked = rounds(active(Recorder(None)), 200)
    assert asked[:128] == [True] * 128
    assert not asked[128]


def test_a_proposer_whose_gains_come_in_turns_does_not_rest() -> None:
    def in_turns(step: int) -> float:
        return 2.0 if step % 120 < 12 else 0.0

    asked = rounds(active(), 1200, in_turns)
    useful = [was for step, was in enumerate(asked, start=1) if step % 120 < 12]
    assert all(useful)


def test_a_trial_that_pays_ends_the_rests() -> None:
    proposer = active()
    assert not rounds(proposer, 48)[-1]
    assert all(rounds(proposer, 60, lambda step: 0.5, begin=49))


def test_after_a_rest_a_proposer_has_all_ids() -> None:
    recorder = Recorder()
    asked = rounds(active(recorder), 49)
    assert asked[-1]
    assert not asked[-2]
    assert recorder.ids == list(range(49))
    assert recorder.calls == sum(asked)


def test_a_long_prompt_that_was_cached_is_read_in_several_steps() -> None:
    recorder = Recorder()
    proposer = active(recorder)
    ids = list(range(2 * MOST_READ + 1))
    drafts = [proposer.propose(ids, len(ids), 4) for _ in range(3)]
    assert drafts == [None, None, DRAFT], "all sessions wait for a step"
    assert recorder.ids == ids
    assert recorder.calls == 1


def test_a_source_that_saved_nothing_in_earlier_sessions_has_eight_rounds_to_prove_otherwise() -> None:
    record = SourceRecord()
    for _ in range(10):
        rounds(active(record=record), 40)
    assert rounds(active(record=record), 20) == [True] * 8 + [False] * 12
    for _ in range(64):
        record.learn(1.0)
    assert all(rounds(active(record=record), 32)), "others have found that it saves"


def test_a_source_that_rarely_drafts_has_to_save_for_the_rounds_without_a_draft_too() -> None:
    record = SourceRecord()
    for _ in range(3):
        rounds(active(Recorder(None), record), 128)
    assert record.saved < LEAST_PRICE
    assert not rounds(active(record=record), 9)[-1]


@pytest.mark.parametrize(("pass_ms", "batch", "rests"), [(1.0, 1, True), (20.0, 1, False), (20.0, 32, True)])
def test_a_source_has_to_save_what_it_takes_of_a_step(pass_ms: float, batch: int, rests: bool) -> None:
    proposer = active()
    asked = rounds(proposer, 1000, lambda step: 0.07, took_ms=0.1, pass_ms=pass_ms, batch=batch)
    assert all(asked) != rests


def test_the_first_draft_of_a_session_which_reads_its_prompt_is_not_timed() -> None:
    record = SourceRecord()
    for _ in range(3):
        proposer = active(record=record)
        rounds(proposer, 1, took_ms=50.0)
        rounds(proposer, 2, took_ms=0.1, begin=2)
    assert record.ms == pytest.approx(0.1)


def test_a_draft_that_was_interrupted_counts_as_a_slow_one() -> None:
    record = SourceRecord()
    for ms in [90.0] + [0.1] * 8 + [90.0]:
        record.took(ms, offers=True)
    assert 0.1 <= record.ms < 0.15
    for _ in range(400):
        record.took(0.3, offers=True)
    assert record.ms == pytest.approx(0.3, rel=0.01), "they have become slower"


def test_rounds_with_a_draft_are_timed_apart_from_those_without() -> None:
    record = SourceRecord()
    for number in range(2000):
        offers = number % 10 == 0
        record.took(0.2 if offers else 0.004, offers=offers)
    assert record.ms == pytest.approx(0.0236, rel=0.2)


async def test_a_verifier_measures_what_its_proposers_take() -> None:
    async with serving(NgramLM(24)) as verifier:
        await verifier.generate((1, 2, 3), new=40, sources=[("lookup", "")])
        record = verifier.server._manager.reputations.of("lookup", SamplingParams(temperature=0)).record
    assert record.offered.rounds + record.silent.rounds > 1
    assert record.ms > 0.0
    in_time(record.price > LEAST_PRICE, "the last pass of this target takes as little")


def test_rounds_in_which_no_proposer_was_asked_are_not_held_against_it() -> None:
    proposer = active()
    for step in range(1, 200):
        proposer.committed(0.0, spared=False, batch=32, step=step, right=False)
    assert not proposer.is_resting


def test_a_crowd_that_admits_nothing_says_nothing_of_the_source_and_its_end_ends_the_rest() -> None:
    record = SourceRecord()
    proposer = active(record=record)
    rounds(proposer, 200, batch=32, spared=True)
    assert record.saved == SourceRecord().saved
    while not proposer.is_resting:
        rounds(proposer, 1, batch=32, spared=True)
    assert proposer.state.rest == Rest.NOT_ADMITTED
    asked = rounds(proposer, 3, begin=300)
    assert asked[-1], "the batch has halved"


def test_of_eight_worthless_drafts_one_is_offered_however_short_the_sessions() -> None:
    record = SourceRecord()
    offered = [not active(record=record).holds_back(DRAFT, known, 0.6) for _ in range(24)]
    assert offered == ([True] + [False] * 7) * 3
    assert not active(record=record).holds_back(DRAFT, known, 0.4), "this node may be worth its row"


def test_a_tree_is_offered_where_any_of_its_first_nodes_is_worth_its_row() -> None:
    record = SourceRecord(worthless=1)
    tree = Draft((7, 8, 9), (ROOT, 0, ROOT), (0.6, 0.1, 0.5))

    def worth(source: int, estimate: float) -> float:
        return {0.6: 0.1, 0.1: 0.9, 0.5: 0.4}[estimate]

    assert not active(record=record).holds_back(tree, worth, 0.3)
    assert active(record=record).holds_back(tree, worth, 0.5), "nodes further down do not count"


def test_a_trial_offers_every_draft() -> None:
    record = SourceRecord(worthless=1)
    proposer = active(record=record)
    rounds(proposer, 48, least=0.9)
    assert not proposer.is_resting
    assert not any(proposer.holds_back(DRAFT, known, 0.9) for _ in range(8))


def test_a_grammar_never_rests_and_offers_all_that_it_forces() -> None:
    proposers = SessionProposers(ProposerInit(1))
    proposers.use({GRAMMAR: 1, "lookup": 2}, [Reputation(), Reputation()])
    grammar, lookup = proposers
    assert not grammar.holds_back(DRAFT, known, 0.9)
    gains = {1: SourceGain(), 2: SourceGain(own=0.0, hits=0.0)}
    for step in range(1, 200):
        for proposer in proposers:
            proposer.propose([1] * step, step, 4)
        proposers.committed({}, gains, 0.1, spared=False, batch=1, step=step)
    assert not grammar.is_resting
    assert lookup.is_resting
    assert [(state.source, state.rest) for state in proposers.states] == [(2, Rest.GAINS_TOO_LITTLE)]


@BOTH
def test_rests_of_proposers_change_no_token(params: SamplingParams) -> None:
    plain, drafting = CoreDriver(NgramLM(97)), CoreDriver(NgramLM(97), adaptive=True, costs=SLOPED)
    bare = plain.open(new=200, params=params)
    plain.run()
    texts = (tuple(range(96, 0, -1)), tuple(bare.ids[150:]))
    session = drafting.open(new=200, params=params, sources=("lookup", REFERENCES), references=texts)
    rests: set[Rest] = set()
    while drafting.step():
        rests |= {state.rest for state in session.sources.standing(1).states}
    assert session.ids == bare.ids
    assert rests == {Rest.NONE, Rest.GAINS_TOO_LITTLE}


def test_where_the_budget_admits_all_nodes_no_proposer_rests() -> None:
    driver = CoreDriver(NgramLM(97), adaptive=False)
    session = driver.open(new=200, sources=("lookup",))
    while driver.step():
        assert {state.rest for state in session.sources.standing(1).states} == {Rest.NONE}


@pytest.mark.parametrize("novel", [100, 320, 600])
def test_a_copy_that_begins_late_is_followed_at_most_a_rest_later(novel: int) -> None:
    plain = CoreDriver(NgramLM(1999, max_length=4096))
    bare = plain.open(new=novel + 400)
    plain.run()
    drafting = CoreDriver(NgramLM(1999, max_length=4096), adaptive=True, costs=SLOPED)
    text = tuple(bare.ids[-400:])
    session = drafting.open(
        new=novel + 400, sources=("lookup", REFERENCES), node_limit=64, references=(text,)
    )
    drafting.run()
    assert session.ids == bare.ids
    assert len(drafting.passes) < novel + 64 + 60
