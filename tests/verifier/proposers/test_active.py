"""A session's own proposers are left alone where they gain too little, and tried again."""

from collections.abc import Sequence

import pytest
from core_driver import GREEDY, SAMPLED, CoreDriver
from ngram_lm import NgramLM

from outrider.wire.names import GRAMMAR, REFERENCES
from speculative.draft import Draft
from speculative.marginal import SourceGain
from speculative.params import SamplingParams
from verifier_service.engine.source_policy import Reputation
from verifier_service.observe.round_log import Rest, SourceState
from verifier_service.proposers import ProposerInit
from verifier_service.proposers.own_text.active import ActiveProposer, SessionProposers
from verifier_service.remote_sources.source_rests import SourceRecord

DRAFT = Draft((7,), (-1,), (0.5,))


class Recorder:
    """A proposer that drafts one token each time, and keeps what it was given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.calls = 0

    def append(self, tokens: Sequence[int]) -> None:
        self.ids += tokens

    def propose(self, node_limit: int) -> Draft | None:
        self.calls += 1
        return DRAFT


def rounds(active: ActiveProposer, count: int, saved: float = 0.0, begin: int = 1) -> list[bool]:
    """Whether each of some rounds, which commit a token each, asked the proposer."""
    asked = []
    for step in range(begin, begin + count):
        ids = list(range(step))
        asked.append(active.propose(ids, step, 4) is not None)
        active.committed(saved, batch=1, step=step, right=False)
    return asked


def test_a_proposer_that_saves_nothing_rests_after_32_rounds_and_is_tried_ever_more_seldom() -> None:
    asked = rounds(ActiveProposer(1, Recorder(), SourceRecord()), 400)
    assert asked[:32] == [True] * 32
    assert asked[32:48] == [False] * 16
    assert asked[48:56] == [True] * 8
    assert asked[56:88] == [False] * 32
    assert sum(asked[100:]) < 40


def test_a_proposer_that_saves_rounds_never_rests() -> None:
    assert all(rounds(ActiveProposer(1, Recorder(), SourceRecord()), 200, saved=0.1))


def test_a_trial_that_pays_ends_the_rests() -> None:
    active = ActiveProposer(1, Recorder(), SourceRecord())
    asked = rounds(active, 48)
    assert not asked[-1]
    assert all(rounds(active, 60, saved=0.5, begin=49))


def test_after_a_rest_a_proposer_has_all_ids() -> None:
    recorder = Recorder()
    active = ActiveProposer(1, recorder, SourceRecord())
    asked = rounds(active, 49)
    assert asked[-1]
    assert not asked[-2]
    assert recorder.ids == list(range(49))
    assert recorder.calls == sum(asked)


def test_a_source_that_saved_nothing_in_earlier_sessions_has_eight_rounds_to_prove_otherwise() -> None:
    record = SourceRecord()
    for _ in range(10):
        rounds(ActiveProposer(1, Recorder(), record), 40)
    asked = rounds(ActiveProposer(1, Recorder(), record), 20)
    assert asked == [True] * 8 + [False] * 12
    for _ in range(64):
        record.learn(1.0)
    assert all(rounds(ActiveProposer(1, Recorder(), record), 32)), "others have found that it saves"


def test_rounds_in_which_no_proposer_was_asked_are_not_held_against_it() -> None:
    active = ActiveProposer(1, Recorder(), SourceRecord())
    for step in range(1, 200):
        active.committed(0.0, batch=32, step=step, right=False)
    assert not active.rests


def test_what_a_grammar_forces_is_always_drafted() -> None:
    proposers = SessionProposers(ProposerInit(1))
    proposers.use({GRAMMAR: 1, "lookup": 2}, [Reputation(), Reputation()])
    gains = {1: SourceGain(), 2: SourceGain(own=0.0, hits=0.0)}
    for step in range(1, 100):
        for active in proposers:
            active.propose([1] * step, step, 4)
        proposers.committed({}, gains, 0.1, batch=1, step=step)
    (state,) = proposers.states
    assert state == SourceState(2, Rest.GAINS_TOO_LITTLE, None)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rests_of_proposers_change_no_token(params: SamplingParams) -> None:
    plain, drafting = CoreDriver(NgramLM(97)), CoreDriver(NgramLM(97), adaptive=True)
    bare = plain.open(new=160, params=params)
    plain.run()
    texts = (tuple(range(96, 0, -1)), tuple(bare.ids[120:]))
    session = drafting.open(new=160, params=params, sources=("lookup", REFERENCES), references=texts)
    rested: set[int] = set()
    while drafting.step():
        rested |= {state.source for state in session.sources.standing(1).states}
    assert session.ids == bare.ids
    assert rested, "no source rested"
