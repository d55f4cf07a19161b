"""Heads of random weights: ids equal plain decoding, and drafts are those of a fresh session."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from core_driver import GREEDY, SAMPLED
from head_decoding import HeadDecoding

from outrider.lm.compiled.head_builder import HeadBuilder
from outrider.lm.heads.config import HeadNeeds
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.hydra import HydraHeads, HydraSizes
from outrider.lm.heads.layer import LayerOptions
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.mtp import PredictionModule
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.runner import PackedLM
from speculative.params import SamplingParams
from tests.lm.compiled_heads import LAYOUTS, compiled, random_head
from tests.lm.families import VOCABULARY
from tests.lm.random_heads import LAYER, TARGET, shaken
from verifier_service.proposers.batched import BatchedProposer, ProposerNeeds
from verifier_service.proposers.heads.eagle import EagleProposer
from verifier_service.proposers.heads.hydra import HydraProposer, PrefixedHydraProposer
from verifier_service.proposers.heads.medusa import MedusaProposer
from verifier_service.proposers.heads.plan import HeadLimits

PENALISED = SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.2)
LIMITS = HeadLimits(VOCABULARY, 128, frozenset())
PROMPT = tuple(random.Random(1).choices(range(VOCABULARY), k=2 * BLOCK))


def needs_of(head: HeadNeeds) -> ProposerNeeds:
    return ProposerNeeds(layers=head.reads, planes=head.planes)


NEEDS = {
    "medusa": needs_of(HeadNeeds(MedusaHeads.reads)),
    "hydra": needs_of(HeadNeeds(HydraHeads.reads)),
    "hydra with prefix": needs_of(HeadNeeds.of_layer(HydraHeads.reads, TARGET.shape.layer or LAYER)),
    "eagle": needs_of(HeadNeeds.of_layer(EagleHead.reads, LAYER)),
    "eagle3": needs_of(HeadNeeds.of_layer((1, 1, 0), LAYER)),
}


def medusa(lm: PackedLM) -> BatchedProposer:
    heads = shaken(MedusaHeads(TargetParts.of(lm.model), 3)).requires_grad_(False)
    return MedusaProposer(heads, NEEDS["medusa"], LIMITS)


def eagle(lm: PackedLM) -> BatchedProposer:
    head = shaken(EagleHead(TargetParts.of(lm.model), LAYER)).requires_grad_(False)
    return EagleProposer(head, NEEDS["eagle"], LIMITS)


def hydra(lm: PackedLM) -> BatchedProposer:
    heads = shaken(HydraHeads(TargetParts.of(lm.model), HydraSizes(3))).requires_grad_(False)
    return HydraProposer(heads, NEEDS["hydra"], LIMITS)


def prefixed(lm: PackedLM) -> BatchedProposer:
    sizes = HydraSizes(3, prefix=True)
    heads = shaken(HydraHeads(TargetParts.of(lm.model), sizes)).requires_grad_(False)
    return PrefixedHydraProposer(heads, NEEDS["hydra with prefix"], LIMITS)


def eagle3(lm: PackedLM) -> BatchedProposer:
    head = shaken(Eagle3Head(TargetParts.of(lm.model), LAYER, (1, 1, 0), VOCABULARY // 2, True))
    head.d2t = torch.arange(VOCABULARY // 2)
    return EagleProposer(head.requires_grad_(False), NEEDS["eagle3"], LIMITS)


def mtp(lm: PackedLM) -> BatchedProposer:
    head = shaken(PredictionModule(TargetParts.of(lm.model), LAYER, LayerOptions())).requires_grad_(False)
    return EagleProposer(head, NEEDS["eagle"], LIMITS)


MAKERS = {
    "medusa": medusa,
    "hydra": hydra,
    "hydra with prefix": prefixed,
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
}
COMPILED = [f"compiled {layout}" for layout in LAYOUTS]
"""Heads whose passes the kernel computes; their drafts are compared with those of the eager head."""


def decoding(kind: str, **limits: Any) -> HeadDecoding:
    if kind not in COMPILED:
        return HeadDecoding(MAKERS[kind], NEEDS.get(kind, NEEDS["eagle"]), **limits)
    layout = kind.removeprefix("compiled ")
    needs = needs_of(HeadNeeds.of_layer(random_head(layout, TARGET).reads, LAYER))

    def make(lm: PackedLM, is_compiled: bool = True) -> BatchedProposer:
        head = random_head(layout, TargetParts.of(lm.model))
        return EagleProposer(head, needs, LIMITS, HasCompiled(head) if is_compiled else None)

    return HeadDecoding(make, needs, fresh=partial(make, is_compiled=False), **limits)


class HasCompiled(HeadBuilder):
    """A builder that has already built."""

    def __init__(self, head: PairHead) -> None:
        super().__init__(head, VOCABULARY, None)
        self.ready = compiled(head)


def module_of(proposer: Any) -> Any:
    """The module of a head's proposer."""
    known = vars(vars(proposer).get("_passes", proposer))
    return known.get("_head") or known["_heads"]


@pytest.mark.parametrize("kind", [*MAKERS, *COMPILED])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_through_chunks_of_a_prompt_commits_and_wrong_branches_in_a_batch(
    kind: str, params: SamplingParams
) -> None:
    served = decoding(kind, prefill_chunk=7)
    prompts = [PROMPT, PROMPT[3:], (1, 2, 3), (7,)]
    sessions = [served.open(prompt, 12, params, seed) for seed, prompt in enumerate(prompts)]
    served.driver.run()
    counts = served.driver.core.counts
    assert counts["truth"].accepted > 6, "some branches are committed, from behind others"
    assert counts["head"].offered > 30
    if params is PENALISED:
        served.head.drafts.clear()  # a fresh session takes for a prompt what has been generated here
        assert [served.driver.generated(one) for one in sessions] == [
            served.answers[one.handle][1] for one in sessions
        ]
    else:
        served.check(*sessions)


@pytest.mark.parametrize("kind", ["hydra with prefix", "eagle", "eagle3", "mtp", *COMPILED])
def test_behind_a_prompt_of_one_token_beside_longer_ones(kind: str) -> None:
    served = decoding(kind, prefill_chunk=7)
    sessions = [served.open(prompt, 12) for prompt in (PROMPT, PROMPT[3:], (1, 2, 3), (7,))]
    served.driver.run()
    assert not served.driver.core.proposers.muted
    served.check(*sessions)


@pytest.mark.parametrize("kind", ["hydra with prefix", "eagle", "eagle3", "mtp", *COMPILED])
def test_behind_a_prefix_found_again_whose_next_id_is_another(kind: str) -> None:
    served = decoding(kind)
    first = served.open(PROMPT, 8)
    served.driver.run()
    others = [served.open((*PROMPT, next_id), 8) for next_id in (5, 6)]
    served.driver.run()
    assert served.driver.core.kv.prefixes.counts.hit == 2 * len(PROMPT)
    served.check(first, *others)


@pytest.mark.parametrize("kind", ["hydra with prefix", "eagle", *COMPILED])
def test_in_blocks_that_a_session_without_the_head_has_filled(kind: str) -> None:
    served = decoding(kind)
    without = served.open(PROMPT, 2, sources=())
    served.driver.run()
    named = [served.open((*PROMPT, next_id)) for next_id in (5, 6)]
    served.driver.run()
    assert served.driver.core.kv.prefixes.counts.hit == 2 * len(PROMPT)
    served.check(without, *named)


@pytest.mark.parametrize("kind", ["hydra with prefix", "eagle", *COMPILED])
def test_after_a_preemption(kind: str) -> None:
    served = decoding(kind, blocks=12, prefill_chunk=20)
    prompts = [tuple(random.Random(seed).choices(range(VOCABULARY), k=20)) for seed in range(4)]
    sessions = [served.open(prompt, 36, SAMPLED, seed) for seed, prompt in enumerate(prompts)]
    served.driver.run()
    assert served.driver.core.totals.preempted > 0
    served.head.drafts[:] = served.head.drafts[::5]
    served.check(*sessions)


@pytest.mark.parametrize("kind", ["hydra with prefix", "eagle", *COMPILED])
def test_after_a_preemption_that_leaves_nothing_cached(kind: str) -> None:
    """The session reads all its ids in the next step: what it gave up is not to be drafted from."""
    served = decoding(kind)
    session = served.open(PROMPT[:6], 40)
    while len(session.ids) < 9:
        served.driver.step()
    served.driver.core.sessions._preempt(session)
    served.driver.run()
    served.check(session)


@pytest.mark.parametrize("kind", ["hydra with prefix", "eagle", "eagle3", *COMPILED])
def test_after_a_takeover(kind: str) -> None:
    served = decoding(kind)
    first = served.open(PROMPT)
    while len(first.ids) < len(PROMPT) + BLOCK + 3:
        served.driver.step()
    ids = tuple(first.ids)
    served.driver.core.sessions.park(first)
    second = served.open(ids, len(PROMPT) + 24 - len(ids))
    served.driver.run()
    assert served.driver.core.kv.prefixes.counts.hit == 3 * BLOCK
    served.check(second)


def test_a_head_whose_passes_become_compiled_amid_a_session_goes_on_with_the_pairs_that_it_has() -> None:
    builders: list[HeadBuilder] = []

    def make(lm: PackedLM) -> BatchedProposer:
        head = random_head("eagle", TargetParts.of(lm.model))
        builders.append(HeadBuilder(head, VOCABULARY, None))
        return EagleProposer(head, NEEDS["eagle"], LIMITS, builders[-1])

    served = HeadDecoding(make, NEEDS["eagle"], prefill_chunk=7)
    sessions = [served.open(prompt, 20, SAMPLED, 1) for prompt in (PROMPT, PROMPT[3:], (1, 2, 3))]
    while len(sessions[0].ids) < len(PROMPT) + 5:
        served.driver.step()
    builders[0].ready = compiled(random_head("eagle", TARGET))
    served.driver.run()
    served.check(*sessions)


@pytest.mark.parametrize(("kind", "call"), [("medusa", 2), ("hydra", 2), ("eagle", 2)])
def test_a_head_that_raises_amid_a_draft_is_muted_and_costs_its_own_time_alone(kind: str, call: int) -> None:
    served = decoding(kind)
    module = module_of(served.head._proposer)
    logits, calls = module.logits, iter(range(call))

    def failing(*given: Any) -> Any:
        if next(calls, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access")
        return logits(*given)

    module.logits = failing
    sessions = [served.open(PROMPT, 8), served.open((1, 2, 3), 8, SAMPLED, 1)]
    served.driver.run()
    assert "illegal memory" in served.driver.core.proposers.muted["head"]
    for session in sessions:
        assert served.driver.generated(session) == served.answers[session.handle][1]


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_that_are_not_numbers_mute_the_head_and_nothing_else(kind: str) -> None:
    served = decoding(kind)
    module = module_of(served.head._proposer)
    for weight in module.parameters():
        weight.fill_(float("nan"))
    session = served.open(PROMPT, 8)
    served.driver.run()
    assert served.driver.generated(session) == served.answers[session.handle][1]
    assert "nan" in served.driver.core.proposers.muted["head"]
