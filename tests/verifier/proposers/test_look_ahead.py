"""Look-ahead tokens (PaSS): scouts behind the vocabulary that draft for the next round and change no id."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from core_driver import GREEDY, SAMPLED, CoreDriver
from head_decoding import HeadDecoding, target_for

from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from outrider.lm.heads.published import write_head
from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import EmptySupport
from speculative.params import SamplingParams
from tests.lm.families import VOCABULARY
from tests.lm.random_heads import WIDTH, shaken
from verifier_service.proposers.batched import (
    BatchedProposer,
    DraftAsk,
    DraftLevel,
    ProposerConfig,
    ProposerNeeds,
)
from verifier_service.proposers.heads.look_ahead import LookAheadProposer, plan

PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2)
BIASED = SamplingParams(temperature=0.0, presence_penalty=0.5, logit_bias=((3, 1.0),))
NEEDS = ProposerNeeds(tops=4, scout_ids=3)
PROMPT = tuple(random.Random(1).choices(range(VOCABULARY), k=20))
EMBEDDINGS = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))


def look_ahead(lm: PackedLM) -> BatchedProposer:
    return LookAheadProposer(lm.add_embeddings(EMBEDDINGS))


class Digits:
    """A grammar's state that allows ids below ten alone, and knows no id behind the vocabulary."""

    def allowed(self, path: Sequence[int]) -> Any:
        if any(id_ >= 10 for id_ in path):
            raise EmptySupport("an id that is no digit")
        return torch.arange(VOCABULARY).lt(10).numpy()

    def forced(self, most: int) -> tuple[int, ...]:
        return ()

    def off_path_matcher(self) -> "Digits":
        return self

    def commit(self, tokens: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED, BIASED])
def test_ids_equal_plain_decoding_through_commits_and_wrong_branches_in_a_batch(
    params: SamplingParams,
) -> None:
    served = HeadDecoding(look_ahead, NEEDS, prefill_chunk=7)
    sessions = [
        served.open(prompt, 16, params, seed)
        for seed, prompt in enumerate([PROMPT, PROMPT[3:], (1, 2), (7,)])
    ]
    served.driver.run()
    assert not served.driver.core.proposers.muted
    assert served.driver.core.totals.scouts > 60
    assert served.driver.core.counts["head"].offered > 30
    assert served.driver.core.counts["truth"].accepted > 6, "some rounds end behind others, where chains hang"
    for session in sessions:
        assert served.driver.generated(session) == served.answers[session.handle][1]


def test_what_the_target_says_at_look_ahead_tokens_is_drafted_for_the_places_behind_the_round() -> None:
    lm, alone = target_for(NEEDS), target_for(NEEDS)
    alone.add_embeddings(EMBEDDINGS)
    proposer = Watched(look_ahead(lm))
    driver = CoreDriver(lm, {"head": proposer})
    session = driver.open(PROMPT, 12, GREEDY, sources=("head",), node_limit=16)
    driver.run()
    ids = tuple(session.ids)
    drafts = [(length, tree) for length, tree in proposer.drafts if tree]
    assert len(drafts) > 4
    for length, tree in drafts:
        # Its chain hung below a row of the last round, one to three places before the place that is drafted.
        said = {guessed(alone, ids[:end], length - end) for end in range(length - 3, length)}
        assert tree[0].tokens[0] in said


class Watched:
    """A proposer whose drafts are written down, with the number of tokens that they follow."""

    def __init__(self, proposer: BatchedProposer) -> None:
        self.needs = proposer.needs
        self.drafts: list[tuple[int, list[DraftLevel]]] = []
        self._proposer = proposer
        self._ids: Sequence[int] = ()

    def open(self, session: Any) -> None:
        self._ids = session.ids
        self._proposer.open(session)

    def saw(self, seen: Any) -> None:
        self._proposer.saw(seen)

    def close(self, handle: int) -> None:
        self._proposer.close(handle)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        tree: list[DraftLevel] = []
        self.drafts.append((len(self._ids), tree))
        for levels in self._proposer.draft(asks):
            tree += [level for level in levels if level is not None and level.tokens]
            yield levels


def guessed(lm: PackedLM, ids: Sequence[int], place: int) -> int:
    """What the target says at a look-ahead token of a chain below these ids, the first place being 1."""
    table = lm.table()
    text = [*ids, *range(VOCABULARY, VOCABULARY + 3)]
    outcome = lm.forward([SequenceRows(table, text, range(-1, len(text) - 1), (len(ids) + place - 1,))])
    lm.release(table)
    return int(outcome.row(0).argmax())


def test_a_grammar_that_knows_no_such_ids_is_kept_and_nobody_is_muted() -> None:
    answers = []
    for sources in ((), ("head",)):
        lm = target_for(NEEDS)
        driver = CoreDriver(lm, {"head": look_ahead(lm)})
        session = driver.open(PROMPT, 10, SAMPLED, sources=sources, node_limit=16, matcher=Digits())
        driver.run()
        assert not driver.core.proposers.muted
        answers.append(driver.generated(session))
    assert answers[0] == answers[1]
    assert max(answers[0]) < 10


def test_ids_behind_the_vocabulary_are_never_chosen_and_only_given_ids_are_known() -> None:
    lm = target_for(NEEDS)
    assert lm.add_embeddings(EMBEDDINGS) == range(VOCABULARY, VOCABULARY + 3)
    assert lm.add_embeddings(EMBEDDINGS[:1]) == range(VOCABULARY + 3, VOCABULARY + 4), "a second head's"
    table = lm.table()
    outcome = lm.forward([SequenceRows(table, [1, VOCABULARY + 3], (-1, 0), (0, 1))])
    assert len(outcome.row(1)) == VOCABULARY
    with pytest.raises(ValueError, match="outside the vocabulary"):
        lm.forward([SequenceRows(lm.table(), [VOCABULARY + 4], (-1,), (0,))])


def test_a_target_that_verifies_chains_takes_no_look_ahead_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    lm = PackedLM.load(tiny_llama, check=False)
    write_head(shaken(LookAheadEmbeddings(TargetParts.of(lm.model), 3)), tmp_path, torch.float32)
    made = plan(ProposerConfig("pass", str(tiny_llama), str(tmp_path)))
    assert made.needs.scout_ids == 3
    lm.pool.chains_only = True  # as a target's with recurrent layers
    with pytest.raises(Exception, match="verifies chains, and look-ahead tokens hang below branches"):
        made.make(lm)
