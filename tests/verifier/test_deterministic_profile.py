"""The engine under the deterministic profile: the ids of plain decoding, whatever shares the steps.

In bfloat16, where near ties are common, and with keys and values in int8, where roundings are coarse.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_source import FakeSource, Garbage, Oracle, running
from harness import serving
from pydantic import ValidationError

from outrider.lm.runner import PackedLM
from outrider.v1 import verifier_pb2
from speculative.errors import InvalidRequest
from speculative.params import SamplingParams
from tests.in_time import in_time
from verifier_service.loading import load_target
from verifier_service.settings import VerifierSettings

NEW = 120
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, ignore_eos=True)
PROMPTS = [(5, 17, 40), (60, 2, 33, 33, 33, 9, 80), tuple(range(2, 90)), (11,)]


def loaded(folder: Path, kv_dtype: str) -> PackedLM:
    return load_target(
        VerifierSettings(model=str(folder), dtype="bfloat16", deterministic=True, kv_mb=1, kv_dtype=kv_dtype)
    )


@pytest.fixture(scope="module", params=["auto", "int8"])
def target(request: pytest.FixtureRequest, tiny_llama: Path) -> PackedLM:
    return loaded(tiny_llama, request.param)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(target: PackedLM) -> Iterator[None]:
    yield
    target.pool.check_integrity()
    assert target.pool.used_slots == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_ids_with_drafts_and_company_are_those_of_plain_decoding_alone(
    target: PackedLM, params: SamplingParams
) -> None:
    async with serving(target, deterministic=True) as alone:
        plain = {prompt: (await alone.generate(prompt, params=params, new=NEW)).ids for prompt in PROMPTS}
    assert sum(map(len, plain.values())) > 300
    async with serving(target, deterministic=True, prefill_chunk=24) as verifier:
        for behaviour in (Oracle(plain, siblings=3), Garbage()):
            async with running(FakeSource(behaviour)) as source:
                sources = [("drafter", source.address), ("lookup", "")]
                answers = await asyncio.gather(
                    *(verifier.generate(p, params=params, new=NEW, sources=sources) for p in PROMPTS)
                )
            assert [answer.ids for answer in answers] == list(plain.values())
        in_time(verifier.nodes("drafter", "accepted") > 50)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
async def test_sessions_that_give_way_and_find_prefixes_again_keep_their_ids(
    tiny_llama: Path, kv_dtype: str
) -> None:
    target = loaded(tiny_llama, kv_dtype)
    asked = [(prompt, seed) for seed in range(3) for prompt in PROMPTS]
    async with serving(target, deterministic=True) as alone:
        plain = [
            (await alone.generate(prompt, params=SAMPLED, new=NEW, seed=seed)).ids for prompt, seed in asked
        ]
    target.pool.take(target.pool.max_blocks - 40)
    async with serving(target, deterministic=True, prefix_cache=True) as verifier:
        answers = await asyncio.gather(
            *(
                verifier.generate(prompt, params=SAMPLED, new=NEW, seed=seed, sources=[("lookup", "")])
                for prompt, seed in asked
            )
        )
        assert verifier.metric("num_preemptions_total") > 0
    assert [answer.ids for answer in answers] == plain


async def test_the_description_and_the_usage_say_which_promise_holds(
    target: PackedLM, tiny_llama: Path
) -> None:
    async with serving(target, deterministic=True) as verifier:
        said = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
        assert said.numerics == target.numerics
        assert said.numerics.startswith("cpu bfloat16 deterministic ")
        assert (await verifier.generate((5, 6), new=3)).usage.replay_identical
    async with serving(PackedLM.load(tiny_llama)) as verifier:
        assert not (await verifier.generate((5, 6), new=3)).usage.replay_identical


def test_one_thread_is_what_it_takes_and_more_are_refused(tiny_llama: Path) -> None:
    settings = VerifierSettings(model=str(tiny_llama), deterministic=True, threads=3)
    with pytest.raises(InvalidRequest, match="threads = 3"):
        load_target(settings)
    with pytest.raises(ValidationError):
        VerifierSettings(model=str(tiny_llama), deterministic="perhaps")  # type: ignore[arg-type]
