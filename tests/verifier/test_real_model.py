"""On a real model: plain greedy ids are those of `generate`, and drafts of every kind change nothing."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_source import FakeSource, Garbage, Oracle, running
from harness import GREEDY, Verifier, eventually, serving

from outrider.lm.runner import PackedLM
from outrider.tokens import ChatTemplate, TokenTable
from outrider.v1 import common_pb2, verifier_pb2
from speculative.params import SamplingParams
from tests.in_time import in_time

NEW = 48
PROMPTS = [(5, 17, 40), (60, 2, 33, 33, 33, 9, 80), tuple(range(2, 90)), (11,)]
PARAMS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8),
    "cuts": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias=((7, 2.0), (1, -100.0)),
    ),
}
Ids = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> PackedLM:
    return PackedLM.load(tiny_llama)


async def plain(verifier: Verifier, params: SamplingParams) -> Ids:
    return {prompt: (await verifier.generate(prompt, params=params, new=NEW)).ids for prompt in PROMPTS}


async def test_plain_greedy_ids_are_those_of_generate(target: PackedLM, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, local_files_only=True)
    async with serving(target) as verifier:
        ids = await plain(verifier, GREEDY)
    for prompt in PROMPTS:
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        assert ids[prompt] == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", PARAMS)
async def test_ids_with_drafts_equal_ids_without(target: PackedLM, kind: str) -> None:
    params = PARAMS[kind]
    async with serving(target, prefill_chunk=32) as verifier:
        expected = await plain(verifier, params)
        for behaviour in (Oracle(expected, siblings=3), Oracle(expected, late=3), Garbage()):
            async with running(FakeSource(behaviour)) as source:
                sources = [("drafter", source.address), ("lookup", "")]
                answers = await asyncio.gather(
                    *(verifier.generate(p, params=params, new=NEW, sources=sources) for p in PROMPTS)
                )
            assert [answer.ids for answer in answers] == list(expected.values())
        in_time(verifier.nodes("drafter", "accepted") > 20)
        in_time(verifier.nodes("drafter", "admitted") > verifier.nodes("drafter", "accepted"))


async def test_every_step_is_one_call_of_the_model(target: PackedLM) -> None:
    calls: list[bool] = []
    all_are_open = threading.Event()
    hook = target.model.register_forward_pre_hook(lambda *_: calls.append(all_are_open.wait(60)))
    try:
        async with serving(target) as verifier:
            requests = [verifier.request(prompt, new=12, sources=[("lookup", "")]) for prompt in PROMPTS]
            for request in requests:
                await verifier.open(request)
            all_are_open.set()
            await asyncio.gather(*(verifier.read(request) for request in requests))
            assert len(calls) == verifier.metric("steps_total")
            assert len(calls) <= 13
    finally:
        hook.remove()


async def test_cancel_gives_the_slots_back(target: PackedLM) -> None:
    async with serving(target) as verifier:
        before = target.pool.used_slots
        requests = [verifier.request(prompt, new=120, params=PARAMS["penalties"]) for prompt in PROMPTS]
        for request in requests:
            await verifier.open(request)
        await eventually(lambda: target.pool.used_slots > before)
        for request in requests:
            await verifier.cancel(request)
        await asyncio.gather(*(verifier.read(request) for request in requests))
        assert target.pool.used_slots == before
        target.pool.check_integrity()


@pytest.mark.parametrize("kind", PARAMS)
async def test_ids_with_a_batched_proposer_equal_ids_without(target: PackedLM, kind: str) -> None:
    params = PARAMS[kind]
    async with serving(target, proposers="bigram", prefill_chunk=32, budget="fixed") as verifier:
        expected = await plain(verifier, params)
        sources = [("bigram", ""), ("lookup", "")]
        answers = await asyncio.gather(
            *(verifier.generate(prompt, params=params, new=NEW, sources=sources) for prompt in PROMPTS)
        )
        assert verifier.nodes("bigram", "offered") > 0
        assert verifier.metric("proposers_muted") == 0
    assert [answer.ids for answer in answers] == list(expected.values())


async def test_a_stop_string_ends_a_request_at_the_id_that_completes_it(target: PackedLM) -> None:
    assert target.tokenizer_json is not None
    tokens = TokenTable.from_json(target.tokenizer_json)
    async with serving(target) as verifier:
        ids = (await verifier.generate(PROMPTS[1], new=NEW)).ids
        text = b"".join(tokens.token_bytes(id_) for id_ in ids)
        stop = next(text[at : at + 3] for at in range(8, len(text)) if text[at : at + 3].isascii())
        expected, so_far = [], b""
        for id_ in ids:
            expected.append(id_)
            so_far += tokens.token_bytes(id_)
            if stop in so_far:
                break
        for sources in ([], [("lookup", "")]):
            answer = await verifier.generate(PROMPTS[1], new=NEW, stop=[stop.decode()], sources=sources)
            assert answer.ids == expected
            assert answer.finished == common_pb2.FINISH_REASON_STOP


async def test_the_tokenizer_comes_whole(target: PackedLM) -> None:
    async with serving(target) as verifier:
        said = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
        chunks = [chunk async for chunk in verifier.stub.Tokenizer(verifier_pb2.TokenizerRequest())]
    tokens = TokenTable.from_json(b"".join(chunk.data for chunk in chunks).decode())
    assert tokens.digest == said.tokenizer_digest
    assert (said.model_type, said.numerics) == ("llama", "cpu float32")
    assert list(said.eos_ids) == [1]
    assert not said.HasField("chat_template"), "this tokenizer has none"


async def test_the_chat_template_comes_with_the_tokens_it_may_name(
    target: PackedLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "chat", ChatTemplate("{{ eos_token }}", {"eos_token": "<eos>"}))
    async with serving(target) as verifier:
        said = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
    assert said.chat_template.source == "{{ eos_token }}"
    assert dict(said.chat_template.tokens) == {"eos_token": "<eos>"}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(target: PackedLM) -> Iterator[None]:
    yield
    assert target.pool.used_slots == 0
