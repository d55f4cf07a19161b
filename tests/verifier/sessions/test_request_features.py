"""What else a request may ask, with drafts and without: where it ends, which log-probabilities it gets."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_source import FakeSource, Garbage, Oracle, running
from harness import GREEDY, Answer, Verifier, hold_steps_for_drafts, hold_steps_until, serving
from ngram_lm import NgramLM

from outrider.lm.runner import PackedLM
from outrider.v1 import common_pb2
from speculative.history import History
from speculative.params import SamplingParams
from speculative.sampling import process_logits
from tests.in_time import in_time

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
WIDTH, EOS, NEW = 24, (5, 9), 40
PROMPT = (1, 2, 3)
ENDS = {
    "ends early": {"logit_bias": ((5, 4.0),)},
    "ignores": {"logit_bias": ((5, 4.0), (9, 3.0)), "ignore_eos": True},
    "ends late": {"logit_bias": ((5, 4.0), (7, 4.0)), "min_tokens": 17, "stop_ids": (7,)},
    "ends late, ignores": {"logit_bias": ((5, 4.0),), "min_tokens": 17, "stop_ids": (7,), "ignore_eos": True},
    "stop ids": {"stop_ids": (7, 8, 11, 12), "presence_penalty": 0.3},
}


async def with_drafts(verifier: Verifier, expected: Sequence[int], **asked: Any) -> Answer:
    """The request again, beside a source that knows the answer and adds wrong siblings, and beside lookup."""
    hold_steps_for_drafts(verifier)
    async with running(FakeSource(Oracle({PROMPT: list(expected)}, siblings=3))) as source:
        return await verifier.generate(PROMPT, sources=[("drafter", source.address), ("lookup", "")], **asked)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ENDS)
async def test_a_request_ends_where_it_would_without_drafts(kind: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **ENDS[kind])  # type: ignore[arg-type]
    async with serving(NgramLM(WIDTH, eos_ids=EOS), node_limit=12) as verifier:
        plain = await verifier.generate(PROMPT, params=params, new=NEW)
        # The oracle goes on past the end, so that there is something to cut.
        drafted = await with_drafts(verifier, [*plain.ids, 5, 7, 9, 5, 7], params=params, new=NEW)
        assert (drafted.ids, drafted.finished) == (plain.ids, plain.finished)
        in_time(verifier.nodes("drafter", "accepted") >= min(3, len(plain.ids) - 1))
    end_ids = params.end_ids(EOS)
    assert (plain.finished == STOP) == (plain.ids[-1] in end_ids)
    assert not end_ids & set(plain.ids[:-1])
    if "late" in kind:
        assert not {5, 7, 9} & set(plain.ids[:17])
        assert len(plain.ids) > 17
    if kind == "ignores":
        assert plain.finished == LENGTH
        assert {5, 9} & set(plain.ids)
    if temperature == 0.0 and kind in ("ends early", "ends late"):
        assert plain.finished == STOP


async def test_a_source_hears_which_tokens_are_held_back() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=4, stop_ids=(7,))
    follower = FakeSource()
    target = NgramLM(WIDTH, eos_ids=EOS)
    async with serving(target, budget="fixed") as verifier, running(follower) as source:
        for sessions, asked in enumerate((params, GREEDY), start=1):
            hold_steps_until(verifier, lambda sessions=sessions: len(follower.follows) >= sessions)
            await verifier.generate(PROMPT, params=asked, sources=[("drafter", source.address)])
    first, second = (follow.sampling for follow in follower.follows)
    assert (first.min_tokens, list(first.stop_ids)) == (4, [5, 7, 9])
    assert not second.stop_ids


async def test_a_session_moved_before_min_tokens_goes_on_as_it_would_have() -> None:
    params = SamplingParams(temperature=0.9, **ENDS["ends late"])  # type: ignore[arg-type]
    async with serving(NgramLM(WIDTH, eos_ids=EOS)) as verifier:
        whole = await verifier.generate(PROMPT, params=params, new=NEW)
        moved = verifier.request((*PROMPT, *whole.ids[:9]), params=params, prompt_length=3, limit=3 + NEW)
        await verifier.open(moved)
        assert (await verifier.read(moved)).ids == whole.ids[9:]


async def test_logprobs_are_a_softmax_of_the_logits_that_chose() -> None:
    params = SamplingParams(temperature=0.8, top_k=6, frequency_penalty=0.5, logit_bias=((4, 1.0),))
    async with serving(NgramLM(WIDTH), node_limit=12) as verifier:
        for of, name in ((1, "raw"), (2, "processed")):
            asked: dict[str, Any] = {
                "params": params,
                "new": NEW,
                "logprobs": common_pb2.Logprobs(top_logprobs=5, logprobs_of=of),  # type: ignore[arg-type]
            }
            plain = await verifier.generate(PROMPT, **asked)
            drafted = await with_drafts(verifier, plain.ids, **asked)
            assert drafted.ids == plain.ids
            assert drafted.logprobs == plain.logprobs
            in_time(drafted.usage.rounds < plain.usage.rounds, "some are accepted, some the target's own")
            assert len(plain.logprobs) == NEW
            for at, found in enumerate(drafted.logprobs):
                before = [*PROMPT, *plain.ids[:at]]
                scores = verifier.target.logits(before).astype(np.float64)
                if name == "processed":
                    scores = process_logits(scores, params, History.of(before, len(PROMPT)))
                logprobs = scores - np.log(np.exp(scores).sum())
                order = np.argsort(-logprobs, kind="stable")[:5]
                assert found.logprob == pytest.approx(logprobs[plain.ids[at]], abs=1e-5)
                assert list(found.top_ids) == order.tolist()
                assert list(found.top_logprobs) == pytest.approx(logprobs[order].tolist(), abs=1e-5)


async def test_logprobs_come_only_where_they_are_asked_for() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        assert (await verifier.generate(PROMPT)).logprobs == []
        bare = await verifier.generate(PROMPT, logprobs=common_pb2.Logprobs())
        assert [list(found.top_ids) for found in bare.logprobs] == [[]] * 24
        moved = verifier.request((1, 2, 3, 4), prompt_length=3, limit=6, logprobs=common_pb2.Logprobs())
        await verifier.open(moved)
        assert len((await verifier.read(moved, position=3)).logprobs) == 2, "none of what came with Open"


async def test_logprobs_of_a_batch_with_drafts_are_those_of_transformers(tiny_llama: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, local_files_only=True).float()
    prompts = [(5, 17, 40), (60, 2, 33, 33, 33, 9, 80), tuple(range(2, 70)), (11,)]
    asked: dict[str, Any] = {"new": 48, "logprobs": common_pb2.Logprobs(top_logprobs=20)}
    async with serving(PackedLM.load(tiny_llama), prefill_chunk=32) as verifier:
        for params in (GREEDY, SamplingParams(temperature=0.8, repetition_penalty=1.2)):
            expected = {p: (await verifier.generate(p, params=params, new=48)).ids for p in prompts}
            for behaviour in (Oracle(expected, siblings=3), Garbage()):
                async with running(FakeSource(behaviour)) as source:
                    sources = [("drafter", source.address)]
                    answers = await asyncio.gather(
                        *(verifier.generate(p, params=params, sources=sources, **asked) for p in prompts)
                    )
                for prompt, answer in zip(prompts, answers, strict=True):
                    assert answer.ids == expected[prompt]
                    with torch.inference_mode():
                        logits = model(torch.tensor([[*prompt, *answer.ids]])).logits[0]
                    rows = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1].numpy()
                    for row, id_, found in zip(rows, answer.ids, answer.logprobs, strict=True):
                        assert found.logprob == pytest.approx(row[id_], abs=1e-4)
                        assert list(found.top_logprobs) == pytest.approx(
                            np.sort(row)[::-1][:20].tolist(), abs=1e-4
                        )
                        assert row[list(found.top_ids)] == pytest.approx(list(found.top_logprobs), abs=1e-4)
        in_time(verifier.nodes("drafter", "accepted") > 20)
