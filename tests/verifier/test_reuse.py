"""Keys and values that outlive their session, or are computed once for several: the ids stay the same."""

import asyncio
from typing import Any

import pytest
from harness import GREEDY, Verifier, eventually, open_together, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2
from speculative.params import SamplingParams

PROMPT = [n * 7 % 32 for n in range(70)]
LOOKUP = [("lookup", "")]
SAMPLED = SamplingParams(temperature=0.9)


def rows_of(target: NgramLM) -> int:
    rows, target.rows[:] = sum(target.rows), []
    return rows


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
async def test_a_second_turn_computes_only_what_is_new(params: SamplingParams) -> None:
    target = NgramLM(max_length=512)
    async with serving(target, prefix_cache=True) as verifier:
        first = await verifier.generate(PROMPT, new=40, params=params, seed=3)
        rows_of(target)
        longer = [*PROMPT, *first.ids, 5, 6, 7]
        second = await verifier.generate(longer, new=10, params=params, seed=4)
        assert rows_of(target) < 16 + 3 + 10 + 2
    async with serving(NgramLM(max_length=512)) as fresh:
        assert second.ids == (await fresh.generate(longer, new=10, params=params, seed=4)).ids


async def test_speculation_does_not_change_what_is_found_again() -> None:
    found = []
    for sources in ((), LOOKUP):
        target = NgramLM(max_length=512)
        async with serving(target, prefix_cache=True) as verifier:
            first = await verifier.generate(PROMPT, new=40, sources=sources)
            rows_of(target)
            await verifier.generate([*PROMPT, *first.ids, 1], new=1)
            found.append(rows_of(target))
    assert found[0] == found[1]


async def test_another_tenant_computes_everything_itself() -> None:
    target = NgramLM(max_length=512)
    async with serving(target, prefix_cache=True) as verifier:
        await verifier.generate(PROMPT, new=1, key=common_pb2.SessionKey(tenant="a", session="s"))
        rows_of(target)
        await verifier.generate(PROMPT, new=1, key=common_pb2.SessionKey(tenant="b", session="s"))
        assert rows_of(target) >= len(PROMPT)


async def together(verifier: Verifier, count: int) -> list[list[int]]:
    requests = [verifier.request(PROMPT, new=20, params=SAMPLED, seed=n) for n in range(count)]
    await asyncio.gather(*(verifier.open(request) for request in requests))
    return [answer.ids for answer in await asyncio.gather(*map(verifier.read, requests))]


async def test_sessions_that_begin_alike_at_once_compute_their_beginning_once() -> None:
    target = NgramLM(max_length=512)
    target.step_s = 0.002
    async with serving(target, prefix_cache=True, prefill_chunk=32) as verifier:
        answers = await together(verifier, 6)
        assert rows_of(target) < len(PROMPT) + 6 * (16 + 20 + 6)
    async with serving(NgramLM(max_length=512)) as plain:
        assert answers == await together(plain, 6)


async def test_sessions_that_give_way_again_and_again_lose_nothing() -> None:
    asked: dict[str, Any] = {"new": 150, "params": SAMPLED}
    target = NgramLM(max_length=256, slots=768)
    async with serving(target, prefix_cache=True) as verifier:
        requests = [verifier.request([n] * 20, seed=n, sources=LOOKUP, **asked) for n in range(8)]
        await open_together(verifier, requests)
        answers = await asyncio.gather(*map(verifier.read, requests))
        assert verifier.metric("num_preemptions_total") > 0
        verifier.server._engine.core.kv.check()
    async with serving(NgramLM(max_length=256)) as roomy:
        for n, answer in enumerate(answers):
            assert answer.ids == (await roomy.generate([n] * 20, seed=n, **asked)).ids


async def test_a_higher_epoch_takes_over_what_the_lower_one_computed() -> None:
    target = NgramLM(max_length=512)
    target.step_s = 0.002
    async with serving(target, prefix_cache=True) as verifier:
        first = verifier.request(PROMPT, new=200, session="s", epoch=5)
        await verifier.open(first)
        await eventually(lambda: target.forward_calls > 20)
        rows_of(target)
        answer = await verifier.generate(PROMPT, new=5, session="s", epoch=6)
        assert len(answer.ids) == 5
        assert rows_of(target) < len(PROMPT)
