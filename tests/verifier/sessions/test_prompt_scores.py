"""Prompts that are scored: log-probabilities of their tokens, whatever else the verifier does."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from harness import serving
from ngram_lm import NgramLM

from outrider.lm.runner import PackedLM
from outrider.v1 import common_pb2

WIDTH = 24
SCORED = {"score_prompt": True, "logprobs": common_pb2.Logprobs(top_logprobs=3)}


async def test_a_prompt_is_scored_whatever_is_cached_and_however_it_is_cut(tiny_llama: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, local_files_only=True).float()
    prompts = [tuple(range(2, 96)), (11,), (5, 17, 40, 9), tuple(range(2, 80))]
    target = PackedLM.load(tiny_llama)
    async with serving(target, prefill_chunk=24, prefix_cache=True) as verifier:
        plain = [await verifier.generate(prompt, new=8) for prompt in prompts]
        requests = [verifier.request(prompt, new=8, **SCORED) for prompt in prompts]
        await asyncio.gather(*map(verifier.open, requests))
        answers = await asyncio.gather(*(verifier.read(request, position=1) for request in requests))
        assert verifier.metric("preemptions_total") == 0
    for prompt, answer, expected in zip(prompts, answers, plain, strict=True):
        assert answer.ids == [*prompt[1:], *expected.ids]
        assert answer.usage.cached_tokens == 0
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *expected.ids]])).logits[0]
        rows = torch.log_softmax(logits.double(), -1)[:-1].numpy()
        for row, id_, found in zip(rows, answer.ids, answer.logprobs, strict=True):
            assert found.logprob == pytest.approx(row[id_], abs=1e-4)
            assert list(found.top_logprobs) == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)


async def test_a_scored_prompt_can_be_read_from_anywhere() -> None:
    async with serving(NgramLM(WIDTH), prefill_chunk=4) as verifier:
        request = verifier.request(tuple(range(2, 14)), **SCORED)
        await verifier.open(request)
        whole, rest = await asyncio.gather(
            verifier.read(request, position=1), verifier.read(request, position=7)
        )
    assert rest.ids == whole.ids[6:]
    assert rest.logprobs == whole.logprobs[6:]
    assert len(whole.logprobs) == len(whole.ids)


async def test_a_prompt_that_cannot_be_scored_is_refused() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        for wrong, why in (
            ({"score_prompt": True}, "without logprobs"),
            ({**SCORED, "speculate": True}, "beside speculate"),
            ({**SCORED, "prompt_length": 2}, "generated already"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=why):
                await verifier.open(verifier.request((1, 2, 3), **wrong))
