"""Targets that verify chains: drafts, preemption, reuse, resumption and mates in the batch change no id."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from core_driver import CoreDriver
from fake_source import FakeSource, Garbage, Oracle, running
from grpc.aio import AioRpcError
from harness import GREEDY, Answer, Verifier, eventually, serving, until_parked

from outrider.lm.chains.chain_lm import ChainLM
from outrider.lm.chains.pool import PLACES, ChainMemory, ChainPool
from outrider.lm.outcome import OutcomeWants
from outrider.lm.runner import PackedLM
from outrider.lm.weight_only.profile import WeightOnly
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import CommittedCode
from speculative.errors import InvalidRequest, ModelRefused
from speculative.params import SamplingParams
from speculative.stop import FinishReason
from tests.in_time import in_time
from tests.lm.families import VOCABULARY, greedy_ids, model_of
from verifier_service.loading import load_target
from verifier_service.settings import VerifierSettings

SLOW = pytest.mark.slow
MORE = ("qwen3_next", "mamba2", "jamba", "bloom")
FAMILIES = ["lfm2", *[pytest.param(name, marks=SLOW) for name in MORE]]
NEW = 24
PROMPTS = [(5, 17, 40), (60, 2, 33, 33, 33, 9, 20), tuple(at * 7 % VOCABULARY for at in range(40)), (11,)]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
LONG = PROMPTS[2]
PLAIN: dict[str, Any] = {"params": SAMPLED, "new": 50}
DRAFTED: dict[str, Any] = {**PLAIN, "sources": [("lookup", "")]}
Ids = dict[tuple[int, ...], list[int]]


def chain_lm(family: str, kv_mb: int = 16) -> ChainLM:
    lm = ChainLM(model_of(family), name=family, kv_mb=kv_mb)
    lm.settle(lm.first_trial(), 1)
    lm.eos_ids = ()
    return lm


async def plain(verifier: Verifier, params: SamplingParams) -> Ids:
    return {prompt: (await verifier.generate(prompt, params=params, new=NEW)).ids for prompt in PROMPTS}


@pytest.mark.parametrize("family", FAMILIES)
async def test_ids_with_drafts_equal_generates_and_plain_decodings(family: str) -> None:
    target = chain_lm(family)
    twin = model_of(family)
    async with serving(target, prefill_chunk=36, prefix_cache=True, budget="fixed") as verifier:
        greedy = await plain(verifier, GREEDY)
        assert greedy == {prompt: greedy_ids(twin, list(prompt), NEW) for prompt in PROMPTS}
        sampled = await plain(verifier, SAMPLED)
        assert sampled != greedy
        for params, expected in ((GREEDY, greedy), (SAMPLED, sampled)):
            for behaviour in (Oracle(expected, siblings=3), Oracle(expected, late=3), Garbage()):
                async with running(FakeSource(behaviour)) as source:
                    sources = [("drafter", source.address), ("lookup", "")]
                    answers = await asyncio.gather(
                        *(verifier.generate(p, params=params, new=NEW, sources=sources) for p in PROMPTS)
                    )
                assert [answer.ids for answer in answers] == list(expected.values())
        in_time(verifier.nodes("drafter", "accepted") > 20)
        assert verifier.metric("prefix_cache_hits_total") > 0


@pytest.mark.parametrize("family", [pytest.param("qwen3_next", marks=SLOW), "lfm2"])
async def test_sessions_that_give_way_and_come_back_have_the_same_ids(family: str) -> None:
    prompts = [tuple((at * 7 + first) % VOCABULARY for at in range(36)) for first in range(8)]
    target = chain_lm(family)
    asked: dict[str, Any] = {"params": SAMPLED, "new": 60}
    async with serving(target) as verifier:
        expected = [(await verifier.generate(prompt, **asked)).ids for prompt in prompts]
    target.pool.max_blocks = 24  # five of these sessions do not fit to their ends
    async with serving(target, prefix_cache=True) as verifier:
        asked["sources"] = [("lookup", "")]
        answers = await asyncio.gather(*(verifier.generate(prompt, **asked) for prompt in prompts))
        assert [answer.ids for answer in answers] == expected
        assert verifier.metric("num_preemptions_total") > 0


def test_a_session_that_takes_the_place_of_the_state_behind_its_prefix_is_read_anew() -> None:
    target = chain_lm("lfm2")
    memory = ChainMemory(target.pool.max_slots, 2 * PLACES)
    target.pool = ChainPool(target.pool.layout, memory, target.pool.state_bytes)
    driver = CoreDriver(target)
    first = driver.open(LONG, 4)
    driver.run()
    assert target.pool.kept_states
    other = driver.open(PROMPTS[0], NEW)
    driver.step()
    again = driver.open(LONG, 4)
    driver.run()
    assert [driver.finish_of(session).reason for session in (other, again)] == 2 * [FinishReason.LENGTH]
    assert driver.generated(again) == driver.generated(first)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_parked_session_goes_on_where_its_reader_comes_back(family: str) -> None:
    async with serving(slowed(chain_lm(family)), orphan_grace_s=0.05, prefix_cache=True) as verifier:
        whole = (await verifier.generate(LONG, **PLAIN)).ids
        request = verifier.request(LONG, **DRAFTED)
        got = await first_ids(verifier, request)
        await until_parked(verifier)
        assert verifier.server._engine.core.kv.running_slots == 0
        answer = await verifier.read(request, len(LONG) + len(got))
        assert got + answer.ids == whole
        assert answer.finished == common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_higher_epoch_goes_on_from_the_ids_that_were_committed(family: str) -> None:
    async with serving(slowed(chain_lm(family)), prefix_cache=True) as verifier:
        whole = (await verifier.generate(LONG, **PLAIN)).ids
        old = verifier.request(LONG, session="one", **DRAFTED)
        got = await first_ids(verifier, old)
        assert await taken_over(verifier, old, got) == whole
        assert (await verifier.read(old)).code == CommittedCode.TAKEN_OVER


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_session_that_moves_to_another_verifier_goes_on_with_the_same_ids(family: str) -> None:
    async with serving(slowed(chain_lm(family))) as first, serving(chain_lm(family)) as second:
        whole = (await first.generate(LONG, **PLAIN)).ids
        request = first.request(LONG, **DRAFTED)
        got = await first_ids(first, request)
        assert await taken_over(second, request, got, recovered=True) == whole


def slowed(target: ChainLM) -> ChainLM:
    """Its passes take 10 ms at least, so that a session does not end before something happens to it."""
    real = target.forward

    def forward(sequences: Any) -> Any:
        time.sleep(0.01)
        return real(sequences)

    target.forward = forward  # type: ignore[method-assign]
    return target


async def first_ids(verifier: Verifier, request: verifier_pb2.OpenRequest) -> list[int]:
    """The first ids of a session, whose reader then leaves it while it is running."""
    await verifier.open(request)
    found = Answer()
    reading = asyncio.ensure_future(verifier.read(request, into=found))
    await eventually(lambda: len(found.ids) >= 5)
    reading.cancel()
    await asyncio.wait([reading])
    in_time(not found.finished, "the session ended before its reader left")
    return found.ids


async def taken_over(
    verifier: Verifier, old: verifier_pb2.OpenRequest, got: list[int], **fields: Any
) -> list[int]:
    """All new ids of a request that a session under a higher epoch ends, from the ids that are there on."""
    new = verifier_pb2.OpenRequest()
    new.CopyFrom(old)
    new.ids.extend(got)
    new.MergeFrom(verifier_pb2.OpenRequest(epoch=old.epoch + 1, **fields))
    await verifier.open(new)
    return got + (await verifier.read(new)).ids


async def test_no_more_sessions_run_than_have_places_for_their_states() -> None:
    target = chain_lm("mamba2")
    pool: Any = target.pool
    pool._most_tables = 2
    most: list[int] = []
    real = target.forward

    def forward(sequences: Any) -> Any:
        most.append(len(sequences))
        return real(sequences)

    target.forward = forward  # type: ignore[method-assign]
    async with serving(target) as verifier:
        await asyncio.gather(*(verifier.generate(prompt, params=GREEDY, new=NEW) for prompt in PROMPTS))
    assert max(most) == 2


async def test_windows_of_draws_are_refused_by_name() -> None:
    async with serving(chain_lm("lfm2")) as verifier:
        assert list(verifier.server._description.criteria) == ["typical", "specdec", "blockwise", "bild"]
        request = verifier.request(PROMPTS[0], sources=[("drafter", "127.0.0.1:1")])
        request.criterion.ratio.SetInParent()
        with pytest.raises(AioRpcError, match=r"criterion.ratio judges windows of draws, and .* chains"):
            await verifier.open(request)


async def test_cancel_gives_slots_and_places_back() -> None:
    target = slowed(chain_lm("lfm2"))
    assert isinstance(target.pool, ChainPool)
    places = target.pool.free_places + target.pool.kept_states
    async with serving(target) as verifier:
        requests = [verifier.request(prompt, new=50) for prompt in PROMPTS]
        for request in requests:
            await verifier.open(request)
        await eventually(lambda: target.pool.used_slots > 0)
        for request in requests:
            await verifier.cancel(request)
        await asyncio.gather(*(verifier.read(request) for request in requests))
        assert target.pool.used_slots == 0
    assert target.pool.free_places + target.pool.kept_states == places


async def test_a_verifier_says_that_it_runs_chains() -> None:
    async with serving(chain_lm("lfm2")) as verifier:
        found = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
    assert found.numerics == "cpu float32 chains"


def saved(tmp_path: Path, family: str, **changes: Any) -> Path:
    model = model_of(family, **changes)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_target_that_packed_passes_refuse_is_loaded_for_chains(tmp_path: Path) -> None:
    for family in ("lfm2", "bloom"):
        target = load_target(options(saved(tmp_path / family, family)))
        assert isinstance(target, ChainLM)
        assert target.pool.chains_only


def options(folder: Path, **settings: Any) -> VerifierSettings:
    return VerifierSettings(model=str(folder), kv_mb=8, threads=1, device="cpu", **settings)


def test_a_model_with_states_is_not_even_loaded_for_trees(tmp_path: Path) -> None:
    folder = saved(tmp_path, "lfm2")
    with pytest.raises(ModelRefused, match=r"^lfm2 is not served in chains: the deterministic profile"):
        load_target(options(folder, deterministic=True))
    with pytest.raises(ModelRefused, match=r"^lfm2 is not served: it has recurrent layers"):
        PackedLM.load(folder)


def test_other_weights_are_refused_for_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The refusal comes before anything is multiplied, so it is the same where the kernel cannot be had.
    monkeypatch.setattr(WeightOnly, "check_settings", lambda *given: None)
    for family in ("lfm2", "bloom"):
        folder = saved(tmp_path / family, family)
        with pytest.raises(ModelRefused, match="in chains: weight_dtype = int8 is for packed passes"):
            load_target(options(folder, weight_dtype="int8", cache_dir=None))


def test_int8_is_refused_for_keys_and_values_of_chains(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="lfm2 is not served in chains: keys and values in int8 are for"):
        load_target(options(saved(tmp_path, "lfm2"), kv_dtype="int8"))


def test_chains_are_not_compiled(tmp_path: Path) -> None:
    target = load_target(options(saved(tmp_path, "lfm2")))
    target.compile_passes("auto")
    with pytest.raises(InvalidRequest, match="cannot be compiled: they run chains"):
        target.compile_passes("compiled")
    target.close()


def test_heads_are_refused_for_chains() -> None:
    with pytest.raises(ModelRefused, match="heads draft from hidden states"):
        chain_lm("lfm2").wants = OutcomeWants(features=(0,))


def test_a_model_that_neither_serves_is_refused_with_both_reasons(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert")
    both = r"a packed tree pass differs from.*; bert is not served: a pass of chains differs from"
    with pytest.raises(ModelRefused, match=both) as refused:
        load_target(options(folder))
    assert refused.value.model_type == "bert"


def test_a_model_that_keeps_its_states_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"^recurrent_gemma is not served"):
        load_target(options(saved(tmp_path, "recurrent_gemma")))
