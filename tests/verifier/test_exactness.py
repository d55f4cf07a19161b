"""Drafts never change the output: ids with sources equal ids without, whatever the sources send and when."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_source import Behaviour, Draft, FakeSource, Garbage, Oracle, View, running
from harness import GREEDY, Verifier, hold_steps_for_drafts, hold_steps_until, serving
from ngram_lm import NgramLM

from speculative.params import SamplingParams
from speculative.policies.names import POLICIES
from tests.in_time import in_time

SAMPLED = SamplingParams(temperature=0.8)
CUT = SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01)
PENALISED = SamplingParams(
    temperature=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((5, 1.0),),
)
MIXED = [GREEDY, SAMPLED, CUT, PENALISED, SamplingParams(temperature=0.0, repetition_penalty=1.5)]
Make = Callable[[dict[tuple[int, ...], list[int]]], Behaviour]

BEHAVIOURS: dict[str, Make] = {
    "an oracle": Oracle,
    "an oracle with many wrong siblings": lambda answers: Oracle(answers, siblings=6),
    "an oracle that is late": lambda answers: Oracle(answers, late=4),
    "garbage": lambda answers: Garbage(),
}


async def plain(
    verifier: Verifier, prompts: dict[tuple[int, ...], SamplingParams]
) -> dict[tuple[int, ...], list[int]]:
    return {
        prompt: (await verifier.generate(prompt, params=params, new=40)).ids
        for prompt, params in prompts.items()
    }


def prompts() -> dict[tuple[int, ...], SamplingParams]:
    chance = random.Random(3)
    return {tuple(chance.randrange(24) for _ in range(4 + n)): params for n, params in enumerate(MIXED)}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
async def test_a_batch_of_different_requests_is_not_changed_by(behaviour: str) -> None:
    asked = prompts()
    async with serving(NgramLM(24), node_limit=12) as verifier:
        expected = await plain(verifier, asked)
        hold_steps_for_drafts(verifier)
        async with running(FakeSource(BEHAVIOURS[behaviour](expected))) as source:
            sources = [("drafter", source.address), ("lookup", "")]
            answers = await asyncio.gather(
                *(
                    verifier.generate(prompt, params=params, new=40, sources=sources)
                    for prompt, params in asked.items()
                )
            )
        assert [answer.ids for answer in answers] == list(expected.values())
        in_time(verifier.nodes("drafter", "kept") > 0)
        for answer in answers:
            drafted = sum(answer.usage.accepted_by_source.values())
            assert drafted == sum(source_index > 0 for source_index in answer.token_sources)
            assert drafted + answer.token_sources.count(0) == answer.usage.completion_tokens == 40
            assert answer.usage.rounds == answer.token_sources.count(0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
async def test_an_oracle_is_accepted(params: SamplingParams) -> None:
    async with serving(NgramLM(24), node_limit=15) as verifier:
        expected = await plain(verifier, {(1, 2, 3): params})
        hold_steps_for_drafts(verifier)
        async with running(FakeSource(Oracle(expected, depth=5))) as source:
            sources = [("drafter", source.address)]
            answer = await verifier.generate((1, 2, 3), params=params, new=40, sources=sources)
    assert answer.ids == expected[1, 2, 3]
    in_time(answer.usage.accepted_by_source["drafter"] >= 15, answer.usage)
    in_time(answer.usage.rounds <= 25, answer.usage)


async def test_lookup_is_accepted_where_the_text_repeats() -> None:
    target = NgramLM(6)
    async with serving(target, node_limit=8, budget="fixed") as verifier:
        expected = await verifier.generate([1, 2, 3], new=120)
        answer = await verifier.generate([1, 2, 3], new=120, sources=[("lookup", "")])
    assert answer.ids == expected.ids
    assert answer.usage.accepted_by_source["lookup"] > 40
    assert answer.usage.rounds < 80
    assert answer.usage.admitted >= answer.usage.accepted_by_source["lookup"]


async def test_no_policy_of_a_source_inside_the_verifier_changes_the_ids() -> None:
    async with serving(NgramLM(6), node_limit=8) as verifier:
        for params in (GREEDY, SAMPLED):
            expected = (await verifier.generate([1, 2, 3], new=80, params=params)).ids
            for policy in (*POLICIES, "fixed:1", "confidence:0.9"):
                answer = await verifier.generate(
                    [1, 2, 3], new=80, params=params, sources=[("lookup", "")], policy=policy
                )
                assert answer.ids == expected, policy


@pytest.mark.parametrize("asked", ["request", "worker"])
async def test_a_fixed_depth_bounds_what_a_source_inside_the_verifier_offers(asked: str) -> None:
    settings, fields = ({"policy": "fixed:1"}, {}) if asked == "worker" else ({}, {"policy": "fixed:1"})
    async with serving(NgramLM(6), node_limit=8, budget="fixed", **settings) as verifier:
        answer = await verifier.generate([1, 2, 3], new=80, sources=[("lookup", "")], **fields)
        free = await verifier.generate([1, 2, 3], new=80, sources=[("lookup", "")], policy="survival")
    assert answer.ids == free.ids
    assert 0 < answer.usage.drafted_by_source["lookup"] <= answer.usage.rounds
    assert free.usage.rounds < answer.usage.rounds


async def test_what_is_accepted_is_counted_by_source_and_place() -> None:
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    target = NgramLM(6)
    async with serving(target, node_limit=8, budget="fixed") as verifier:
        answer = await verifier.generate([1, 2, 3], new=120, sources=[("lookup", "")])
        at = [verifier.metric(name, source="lookup", position=str(place)) for place in range(4)]
        assert verifier.metric(name, source="lookup") == answer.usage.accepted_by_source["lookup"]
        assert verifier.metric(name) == verifier.nodes("lookup", "accepted")
    assert at == sorted(at, reverse=True), "nobody else drafted, so a place follows those before it"
    assert at[0] > at[3] > 0


async def test_drafts_for_a_session_that_has_ended_do_no_harm() -> None:
    seen: list[View] = []

    def remember(view: View) -> list[Draft]:
        seen.append(view)
        return [old.draft([1, 2]) for old in seen if old is not view]

    async with serving(NgramLM(24), budget="fixed") as verifier, running(FakeSource(remember)) as source:
        asked: dict[str, Any] = {"new": 25, "sources": [("drafter", source.address)]}
        hold_steps_until(verifier, lambda: len(seen) > 0)
        first = await verifier.generate((1, 2), **asked)
        counts = verifier.server._sources.counts
        hold_steps_until(verifier, lambda: counts["drafter"].stale)
        second = await verifier.generate((1, 2), **asked)
        assert verifier.nodes("drafter", "stale") > 0
        assert first.ids == second.ids
        assert verifier.metric("source_drafts_dropped_total", source="drafter", reason="malformed") == 0
