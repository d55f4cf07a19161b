"""A verifier's metrics of chosen tokens, of rows copied from the device, and of batched proposers."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from harness import GREEDY, Verifier, open_together, serving
from ngram_lm import NgramLM

from outrider.lm.device.digest import RowDigester
from outrider.lm.runner import PackedLM
from speculative.choice import Fallback
from speculative.params import SamplingParams
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.batched import DraftAsk, DraftLevel
from verifier_service.proposers.bigram import BigramProposer

PROMPT = (5, 17, 40)
NEW = 24
SAMPLED = SamplingParams(temperature=0.8)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2)
WIDELY_BIASED = SamplingParams(temperature=0.8, logit_bias=tuple((id_, -1.0) for id_ in range(2, 200)))
"""It names more ids than a digest has room for."""
WIDTH = 320


@pytest.fixture
def on_a_device(tiny_writer: Path) -> PackedLM:
    """A target whose digests are made as on a GPU; it ends no request."""
    target = PackedLM.load(tiny_writer)
    target.digester = RowDigester(target.vocabulary_size, torch.device("cpu"))
    target.eos_ids = ()
    return target


def fallbacks(verifier: Verifier) -> dict[str, float]:
    counted = {why.value: verifier.metric("choice_fallbacks_total", reason=why.value) for why in Fallback}
    return {why: count for why, count in counted.items() if count}


def bytes_down(verifier: Verifier, kind: str) -> float:
    return verifier.metric("bytes_down_total", kind=kind)


@pytest.mark.parametrize("sources", [(), [("lookup", "")]], ids=["plain", "lookup"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_every_token_from_a_digest_is_counted_and_no_row_is_fetched(
    on_a_device: PackedLM, params: SamplingParams, sources: Sequence[tuple[str, str]]
) -> None:
    async with serving(on_a_device, budget="fixed") as verifier:
        assert (verifier.metric("tokens_chosen_total"), bytes_down(verifier, "planned")) == (0, 0)
        await verifier.generate(PROMPT, params=params, new=NEW, sources=sources)
        assert verifier.metric("tokens_chosen_total") == NEW
        assert fallbacks(verifier) == {}
        assert verifier.metric("rows_fetched_total") == bytes_down(verifier, "fetched") == 0
        planned = bytes_down(verifier, "planned")
        assert planned >= NEW * (8 if params.greedy else 1000), "a greedy row needs its highest logit alone"
        assert planned < NEW * (100 if params.greedy else 10_000)


async def test_tokens_that_take_whole_rows_are_counted_with_their_reason_and_their_bytes(
    on_a_device: PackedLM,
) -> None:
    async with serving(on_a_device) as verifier:
        await verifier.generate(PROMPT, params=WIDELY_BIASED, new=NEW)
        await verifier.generate(PROMPT, params=SAMPLED, new=NEW)
        assert verifier.metric("tokens_chosen_total") == 2 * NEW
        assert fallbacks(verifier) == {"named": NEW}
        assert verifier.metric("rows_fetched_total") == NEW
        assert bytes_down(verifier, "fetched") == NEW * WIDTH * 4


async def test_tokens_of_sessions_that_are_sampled_together_are_counted_one_by_one() -> None:
    async with serving(NgramLM(24)) as verifier:
        requests = [verifier.request((1, 2, at), params=SAMPLED, new=NEW, seed=at) for at in range(8)]
        await open_together(verifier, requests)
        await asyncio.gather(*map(verifier.read, requests))
        assert max(verifier.target.batch_sizes) == len(requests)
        assert verifier.metric("tokens_chosen_total") == len(requests) * NEW
        assert fallbacks(verifier) == {}


async def test_a_proposers_time_is_counted_and_one_that_gains_nothing_is_said_to_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def dear(self: BigramProposer, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Takes a while to draft nothing."""
        began = time.perf_counter()
        time.sleep(0.005)
        slept.append(time.perf_counter() - began)
        yield [None for _ in asks]

    monkeypatch.setattr(BigramProposer, "draft", dear)
    costs = StepCostModel({1: 1.0, 64: 1.0})
    async with serving(NgramLM(24), costs=costs, proposers="bigram") as verifier:
        await verifier.generate((1, 2, 3), new=NEW)
        assert not slept
        spent = verifier.metric("proposer_seconds_total", source="bigram")
        assert verifier.metric("proposers_resting", source="bigram") == 0
        await verifier.generate((1, 2, 3), new=200, sources=[("bigram", "")])
        assert 0 < sum(slept) <= verifier.metric("proposer_seconds_total", source="bigram") - spent
        assert verifier.metric("proposers_resting", source="bigram", sampling="greedy") == 1
        assert len(slept) < 100, "it rests in most steps"
        assert verifier.metric("proposers_muted") == 0
