"""The engine: one forward per step over all ready sessions, and one session's trouble is nobody else's."""

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import Answer, Verifier, eventually, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.step_cost import StepCostModel

ERROR = common_pb2.FINISH_REASON_ERROR


async def together(verifier: Verifier, count: int, **asked: Any) -> list[Answer]:
    """Sessions that are all open before the first step is over."""
    gate = threading.Event()
    verifier.target.before_forward = lambda: gate.wait(60)
    requests = [verifier.request([1, 2, 3 + n], **asked) for n in range(count)]
    for request in requests:
        await verifier.open(request)
    gate.set()
    return await asyncio.gather(*(verifier.read(request) for request in requests))


async def test_ready_sessions_share_one_forward_per_step() -> None:
    target = NgramLM()
    async with serving(target) as verifier:
        answers = await together(verifier, 6, new=10)
    assert [len(answer.ids) for answer in answers] == [10] * 6
    assert target.forward_calls <= 11
    assert max(target.batch_sizes) == 6
    assert sum(target.batch_sizes) == 60


async def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    long = [n % 32 for n in range(500)]
    target = NgramLM(max_length=2048)
    target.step_s = 0.005
    async with serving(target, prefill_chunk=64) as verifier:
        short = verifier.request([1, 2], new=2000)
        await verifier.open(short)
        await eventually(lambda: target.forward_calls > 2)
        beside = await verifier.generate(long, new=5)
        assert max(target.rows) <= 64
        assert min(target.batch_sizes[3:]) >= 1
        assert target.batch_sizes.count(2) >= 500 // 64 + 5
        await verifier.cancel(short)
        alone = await verifier.generate(long, new=5)
    assert alone.ids == beside.ids


async def test_the_further_into_a_prompt_the_smaller_its_chunks_beside_another_stream() -> None:
    class Known(StepCostModel):
        def record(self, *_: Any, **__: Any) -> None:
            """What steps of this target take says nothing."""

    target = NgramLM(max_length=2048)
    target.step_s = 0.002
    costs = Known({1: 1.0, 512: 52.1}, deeper_ms=0.0005)
    async with serving(target, costs=costs, prefill_chunk=512, prefill_stall_ms=30.0) as verifier:
        short = verifier.request([1, 2], new=2000)
        await verifier.open(short)
        await eventually(lambda: target.forward_calls > 2)
        before = len(target.rows)
        await verifier.generate([n % 32 for n in range(1000)], new=2)
        await verifier.cancel(short)
    chunks = [rows for rows in target.rows[before:] if rows > 2]
    assert chunks[0] > 128, "at first it is rows alone that cost"
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-2] < 64


async def test_nan_logits_end_one_session_and_no_other() -> None:
    target = NgramLM()
    target.step_s = 0.002
    poisoned = np.full(32, np.nan, dtype=np.float32)
    async with serving(target) as verifier:
        expected = (await verifier.generate([1, 2, 3], new=20)).ids
        target._known[31, 31, 31] = poisoned
        bad, good = await asyncio.gather(
            verifier.generate([31, 31, 31], new=20), verifier.generate([1, 2, 3], new=20)
        )
        assert (bad.finished, bad.code, bad.ids) == (ERROR, 13, [])
        assert "EmptySupport" in bad.message
        assert good.ids == expected
        assert verifier.metric("failed_sessions_total") == 1
        assert target.pool.used_slots == 0


async def test_a_forward_that_fails_ends_its_sessions_and_the_engine_goes_on() -> None:
    target = NgramLM()
    failing = iter([True])

    def out_of_memory() -> None:
        if next(failing, False):
            raise MemoryError("no room for 4 GiB")

    async with serving(target) as verifier:
        target.before_forward = out_of_memory
        answer = await verifier.generate([1, 2, 3])
        assert (answer.finished, answer.code) == (ERROR, 13)
        assert "no room for 4 GiB" in answer.message
        assert len((await verifier.generate([1, 2, 3])).ids) == 24
        assert verifier.failures == []
        assert target.pool.used_slots == 0


async def test_an_engine_that_cannot_go_on_says_so_once() -> None:
    target = NgramLM()

    def broken() -> None:
        raise RuntimeError("the device is gone")

    async with serving(target) as verifier:
        target.before_forward = broken
        for _ in range(3):
            assert (await verifier.generate([1, 2, 3])).finished == ERROR
        await eventually(lambda: verifier.failures)
        assert "3 times in a row" in str(verifier.failures[0])


@pytest.mark.parametrize("stops_first", [False, True], ids=["fails, then stops", "fails as it stops"])
async def test_sessions_of_an_engine_that_cannot_go_on_are_not_waited_for(stops_first: bool) -> None:
    target, fails = NgramLM(), threading.Event()

    def broken() -> None:
        fails.wait(60)
        raise RuntimeError("the device is gone")

    async with serving(target, max_running=1) as verifier:
        target.before_forward = broken
        for number in range(5):  # each of the three passes that fail ends one of them
            await verifier.open(verifier.request([1, 2, number]))
        if stops_first:
            stopping = asyncio.create_task(verifier.server.stop(100.0))
            await eventually(lambda: verifier.server._readers.ending)
            fails.set()
        else:
            fails.set()
            await eventually(lambda: verifier.failures)
            stopping = asyncio.create_task(verifier.server.stop(100.0))
        await asyncio.wait_for(stopping, 30)
        assert verifier.server._table.running == 2


async def test_a_table_that_cannot_be_had_ends_that_session(monkeypatch: pytest.MonkeyPatch) -> None:
    target = NgramLM()
    async with serving(target) as verifier:
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "begin", lambda cache, session: 1 // 0)
            assert (await verifier.generate([1, 2, 3])).finished == ERROR
        assert len((await verifier.generate([1, 2, 3])).ids) == 24


async def test_an_idle_engine_does_not_spin() -> None:
    async with serving(NgramLM()) as verifier:
        engine = verifier.server._engine
        turns: list[float] = []
        turn = engine._turn

        def counted() -> None:
            turns.append(time.perf_counter())
            turn()

        engine._turn = counted
        began = time.monotonic()
        await asyncio.sleep(0.55)
        assert 1 <= len(turns) <= 3 + 10 * (time.monotonic() - began)


async def test_timings_are_shown() -> None:
    target = NgramLM()
    target.step_s = 0.001
    async with serving(target) as verifier:
        await together(verifier, 2, new=30)
        await verifier.generate([1, 2, 3], new=30)
        p50 = verifier.metric("split_ms", sessions="1", quantile="0.5")
        p99 = verifier.metric("split_ms", sessions="1", quantile="0.99")
        assert 0 < p50 <= p99
        steps = verifier.metric("step_seconds_count", phase="forward")
        assert steps == verifier.metric("steps_total") == target.forward_calls
        assert 1000 * verifier.metric("step_seconds_sum", phase="forward") >= steps
        assert verifier.metric("step_split_seconds_count", sessions="1") >= 29
        assert verifier.metric("rows_total") == sum(target.rows)
