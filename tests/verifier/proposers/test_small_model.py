"""A small model inside the verifier: ids stay the target's, and drafts are those of a fresh session."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from core_driver import GREEDY, SAMPLED, CoreDriver
from harness import serving

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest
from speculative.params import SamplingParams
from tests.lm.families import VOCABULARY, model_of
from verifier_service.engine.session import Session
from verifier_service.loading import load_target
from verifier_service.proposers.batched import DraftAsk, DraftLevel, ProposedSession, ProposerConfig
from verifier_service.proposers.planning import plan_proposers
from verifier_service.proposers.small_model import SmallModelProposer, plan
from verifier_service.settings import VerifierSettings

NAME = "small-model"
PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2, top_k=12)
NEW = 24


def pooled(lm: PackedLM, blocks: int) -> PackedLM:
    """The model with storage for so many blocks."""
    lm.pool = SlotPool(lm.pool.layout, max_slots=blocks * BLOCK, initial_slots=4 * BLOCK)
    return lm


def target(blocks: int = 256, seed: int = 0) -> PackedLM:
    return pooled(PackedLM(model_of("llama", seed=seed, max_position_embeddings=128)), blocks)


@cache
def weights() -> Any:
    """The small model: the target's weights with some noise, so that some of its drafts are right."""
    model = model_of("llama", max_position_embeddings=128)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def small(blocks: int = 256) -> PackedLM:
    return pooled(PackedLM(weights()), blocks)


class Watched(SmallModelProposer):
    """Notes each whole draft with the ids that the draft follows."""

    def __init__(self, lm: PackedLM) -> None:
        super().__init__(lm, VOCABULARY)
        self.drafts: list[tuple[ProposedSession, tuple[int, ...], int, list[DraftLevel]]] = []

    def draft(self, asks: Sequence[DraftAsk]) -> Any:
        sessions = [self._followers[ask.handle].session for ask in asks]
        found: list[list[DraftLevel]] = [[] for _ in asks]
        for levels in super().draft(asks):
            for kept, level in zip(found, levels, strict=True):
                kept += [level] if level else []
            yield levels
        for ask, session, levels in zip(asks, sessions, found, strict=True):
            self.drafts.append((session, tuple(session.ids), ask.node_limit, levels))


def drafted_fresh(session: ProposedSession, ids: tuple[int, ...], node_limit: int) -> list[DraftLevel]:
    """What a proposer drafts that reads all ids at once."""
    proposer = SmallModelProposer(small(), VOCABULARY)
    alone = ProposedSession(
        1, "", False, ids, session.prompt_length, session.limit, session.params, session.seed
    )
    proposer.open(alone)
    if len(ids) > 1:
        proposer._read([proposer._followers[1]], to_draft=False)
    return [level for (level,) in proposer.draft([DraftAsk(1, node_limit)]) if level]


def check_drafts(proposer: Watched, each: int = 15) -> None:
    """Drafts equal those of a fresh session; every fifteenth is compared."""
    assert any(levels for *_, levels in proposer.drafts)
    for session, ids, node_limit, levels in proposer.drafts[::each]:
        expected = drafted_fresh(session, ids, node_limit) if levels else []
        assert [level.tokens for level in levels] == [level.tokens for level in expected]
        assert [level.parents for level in levels] == [level.parents for level in expected]
        for level, other in zip(levels, expected, strict=True):
            assert level.survival == pytest.approx(other.survival, abs=1e-4)


@cache
def plain(prompt: tuple[int, ...], params: SamplingParams, seed: int, new: int) -> list[int]:
    driver = CoreDriver(target(), reuse_prefixes=False)
    session = driver.open(prompt, new, params, seed)
    driver.run()
    return driver.generated(session)


class Decoding:
    """Sessions for which the small model drafts."""

    def __init__(self, lm: PackedLM | None = None, blocks: int = 256, **limits: Any) -> None:
        self.proposer = Watched(lm or small())
        self.driver = CoreDriver(target(blocks), {NAME: self.proposer}, **limits)
        self._expected: list[tuple[Session, list[int]]] = []

    def open(
        self, prompt: tuple[int, ...], params: SamplingParams = GREEDY, seed: int = 0, new: int = NEW
    ) -> Session:
        session = self.driver.open(prompt, new, params, seed, sources=(NAME,))
        self._expected.append((session, plain(prompt, params, seed, new)))
        return session

    def run(self) -> None:
        self.driver.run()

    def check(self) -> None:
        """Ids equal plain decoding's, and nothing of an ended session is kept."""
        for session, expected in self._expected:
            assert self.driver.generated(session) == expected
        assert not self.driver.core.proposers.muted
        self.driver.core.proposers.attend(())
        assert self.proposer._lm.pool.used_slots == 0


def random_prompt(seed: int, length: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=length))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_drafts_through_chunks_commits_and_rejected_branches(params: SamplingParams) -> None:
    decoding = Decoding(prefill_chunk=7)
    for seed, prompt in enumerate([random_prompt(1, 40), random_prompt(2), (1, 2, 3), (7,)]):
        decoding.open(prompt, params, seed)
    decoding.run()
    decoding.check()
    counts = decoding.driver.core.counts[NAME]
    assert counts.accepted > NEW, "some branches are committed"
    assert counts.admitted > counts.accepted, "others are rejected"
    check_drafts(decoding.proposer)


def test_drafts_right_behind_a_preemption_and_a_prefix_that_was_found() -> None:
    decoding = Decoding(blocks=12, prefill_chunk=20)
    for seed in range(4):
        decoding.open(random_prompt(seed), SAMPLED, seed, new=36)
    decoding.run()
    assert decoding.driver.core.totals.preempted > 0
    decoding.open((*random_prompt(0), 5), SAMPLED, 9)
    decoding.run()
    assert decoding.driver.core.kv.prefixes.counts.hit > 0
    decoding.check()
    check_drafts(decoding.proposer)


def test_a_session_that_is_taken_over_far_on_is_read_before_it_is_drafted_for() -> None:
    decoding = Decoding()
    decoding.open(random_prompt(3, 90))
    decoding.run()
    decoding.check()
    _, first, _, levels = decoding.proposer.drafts[0]
    assert (len(first), levels) == (90, []), "nothing is drafted before the ids are read"
    check_drafts(decoding.proposer)


def test_a_session_that_the_small_model_has_no_memory_for_goes_on_without_drafts() -> None:
    decoding = Decoding(small(blocks=6))
    for seed in range(3):
        decoding.open(random_prompt(seed, 30), SAMPLED, seed, new=30)
    decoding.run()
    decoding.check()
    assert decoding.driver.core.counts[NAME].accepted > 0, "the sessions that fit are drafted for"


def test_nan_in_the_small_model_ends_its_drafts_alone() -> None:
    model = model_of("llama", max_position_embeddings=128)
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    decoding = Decoding(PackedLM(model))
    decoding.open((1, 2, 3), SAMPLED)
    decoding.run()
    decoding.check()
    assert decoding.driver.core.counts[NAME].offered == 0


def test_ids_that_the_small_model_does_not_know_end_its_drafts_alone() -> None:
    narrow = PackedLM(model_of("llama", vocab_size=VOCABULARY - 9, max_position_embeddings=128))
    decoding = Decoding(narrow)
    for seed in range(3):
        decoding.open(random_prompt(seed, 6 if seed else 30), SAMPLED, seed)
    decoding.run()
    decoding.check()


async def test_a_verifier_serves_the_small_model_that_its_settings_name(tiny_llama: Path) -> None:
    chosen = {"small_model": str(tiny_llama), "threads": 1, "kv_mb": 4, "cache_dir": "none"}
    settings = VerifierSettings(model=str(tiny_llama), **chosen)
    assert list(plan_proposers(settings)) == [NAME]
    lm = load_target(settings)
    async with serving(lm, budget="fixed", **chosen) as verifier:
        for params in (GREEDY, SAMPLED):
            expected = (await verifier.generate((5, 17, 40), new=30, params=params)).ids
            answer = await verifier.generate((5, 17, 40), new=30, params=params, sources=[(NAME, "")])
            assert answer.ids == expected
            assert answer.usage.rounds < 20, "the target drafts for itself, so most drafts are right"
        assert verifier.metric("proposers_muted") == 0


def test_a_small_model_of_another_tokenizer_is_refused_by_name(
    tiny_llama: Path, tiny_llama_bare: Path
) -> None:
    config = ProposerConfig(NAME, "the-target", str(tiny_llama_bare))
    with pytest.raises(InvalidRequest, match=r"bare' has another tokenizer than the target 'the-target'"):
        plan(config).make(PackedLM.load(tiny_llama, check=False))


def test_a_token_that_the_model_does_not_know_ends_the_drafts_though_its_pass_was_not_shown() -> None:
    proposer = SmallModelProposer(small(), VOCABULARY)
    ids = [1, 2, 3]
    proposer.open(ProposedSession(1, "", False, ids, 3, 100, GREEDY, 0))
    (level,) = next(proposer.draft([DraftAsk(1, 4)]))
    assert level is not None
    ids += [5, VOCABULARY]
    assert not list(proposer.draft([DraftAsk(1, 4)]))
