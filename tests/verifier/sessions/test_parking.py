"""A session that nobody reads gives its place and memory up, and goes on where somebody reads it again."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from fake_source import FakeSource, running
from harness import GREEDY, Verifier, eventually, serving, until_parked
from ngram_lm import NgramLM

from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import key_from_wire
from speculative.params import SamplingParams

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
LENGTH = common_pb2.FINISH_REASON_LENGTH
LOOKUP = [("lookup", "")]
SAMPLED = SamplingParams(temperature=0.9, presence_penalty=0.5)
PROMPT = [n * 7 % 32 for n in range(40)]
NEW = 120


@asynccontextmanager
async def quick_to_park(**settings: Any) -> AsyncIterator[Verifier]:
    target = NgramLM()
    target.step_s = 0.005
    async with serving(target, orphan_grace_s=0.1, prefix_cache=True, **settings) as verifier:
        yield verifier


async def parked(verifier: Verifier, request: verifier_pb2.OpenRequest) -> None:
    """A session that has given some of its tokens, and whose reader has gone for long enough."""
    await verifier.open(request)
    await glimpse(verifier, request, request.prompt_length)
    await until_parked(verifier)
    assert verifier.metric("num_requests_running") == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("sources", [(), LOOKUP])
async def test_a_parked_session_goes_on_as_if_it_had_never_stopped(
    params: SamplingParams, sources: Any
) -> None:
    asked: dict[str, Any] = {"new": NEW, "params": params, "sources": sources}
    async with serving(NgramLM()) as verifier:
        alone = await verifier.generate(PROMPT, **asked)
    async with quick_to_park() as verifier:
        request = verifier.request(PROMPT, **asked)
        await parked(verifier, request)
        assert not verifier.server._engine.core.kv.running_slots
        answer = await verifier.read(request)
        assert verifier.metric("sessions_parked") == 0
    assert (answer.ids, answer.finished) == (alone.ids, LENGTH)
    assert answer.usage.completion_tokens == NEW
    assert answer.usage.rounds == NEW - sum(map(bool, answer.token_sources))
    assert len(answer.token_sources) == NEW


async def test_what_a_parked_session_computed_is_not_computed_again() -> None:
    async with quick_to_park() as verifier:
        request = verifier.request(PROMPT, new=NEW)
        await parked(verifier, request)
        await verifier.read(request)
        assert sum(verifier.target.rows) < len(PROMPT) + NEW + 16


async def test_sessions_that_nobody_reads_make_room_for_others() -> None:
    async with quick_to_park(max_sessions=1) as verifier:
        first = verifier.request(PROMPT, new=NEW)
        await parked(verifier, first)
        second = await verifier.generate([1, 2, 3], new=8)
        assert len(second.ids) == 8
        assert len((await verifier.read(first)).ids) == NEW


async def test_a_reader_that_comes_again_and_again_loses_and_repeats_nothing() -> None:
    async with serving(NgramLM()) as verifier:
        alone = (await verifier.generate(PROMPT, new=NEW)).ids
    async with quick_to_park() as verifier:
        request = verifier.request(PROMPT, new=NEW)
        await verifier.open(request)
        got: list[int] = []
        while len(got) < NEW:
            got += await glimpse(verifier, request, len(PROMPT) + len(got))
            await asyncio.sleep(0.12)
    assert got == alone


async def glimpse(verifier: Verifier, request: verifier_pb2.OpenRequest, position: int) -> list[int]:
    """The first ids that a reader gets."""
    call = verifier.stub.Watch()
    cursor = verifier_pb2.Cursor(alias=1, key=request.key, epoch=request.epoch, position=position)
    await call.write(verifier_pb2.WatchRequest(add=[cursor]))
    async with asyncio.timeout(60):
        async for response in call:
            if response.committed:
                call.cancel()
                return list(response.committed[0].ids)
    raise AssertionError("the stream ended")


async def test_a_parked_session_is_forgotten_when_its_lease_ends() -> None:
    async with quick_to_park(lease_s=0.2) as verifier:
        request = verifier.request(PROMPT, new=NEW)
        await parked(verifier, request)
        await eventually(lambda: verifier.metric("sessions_parked") == 0)
        assert (await verifier.read(request)).code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_parked_session_can_be_cancelled() -> None:
    async with quick_to_park() as verifier:
        request = verifier.request(PROMPT, new=NEW)
        await parked(verifier, request)
        assert await verifier.cancel(request)
        assert not await verifier.cancel(request)
        answer = await verifier.read(request)
        assert answer.finished == CANCELLED
        assert answer.usage.completion_tokens == len(answer.ids) > 0


@pytest.mark.parametrize("is_read", [False, True], ids=["nobody reads it", "a reader has come back"])
async def test_a_cancel_that_finds_a_session_about_to_be_parked_ends_it(is_read: bool) -> None:
    async with serving(NgramLM()) as verifier:
        computes, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            computes.set()
            goes_on.wait(100)

        verifier.target.before_forward = hold
        request = verifier.request(PROMPT, new=NEW)
        await verifier.open(request)
        await eventually(computes.is_set)
        verifier.server._manager.sweep(grace_s=0.0, lease_s=300.0)  # the engine parks it behind this pass
        reading = asyncio.create_task(verifier.read(request)) if is_read else None
        view = verifier.server._table.find(key_from_wire(request.key))
        await eventually(lambda: bool(view.cursors) == is_read)
        assert await verifier.cancel(request)
        goes_on.set()
        await eventually(lambda: not verifier.metric("num_requests_running"))
        answer = await (reading or verifier.read(request))
    assert answer.finished == CANCELLED
    assert len(answer.ids) < NEW


async def test_a_parked_session_ends_at_its_deadline_all_the_same() -> None:
    async with quick_to_park() as verifier:
        request = verifier.request(PROMPT, new=NEW, time_left_ms=1_000)
        await parked(verifier, request)
        await asyncio.sleep(1.0)
        answer = await verifier.read(request)
        assert (answer.finished, len(answer.ids) < NEW) == (CANCELLED, True)
        assert "deadline" in answer.message


async def test_a_higher_epoch_takes_a_parked_session_over() -> None:
    async with quick_to_park() as verifier:
        old = verifier.request(PROMPT, new=NEW)
        await parked(verifier, old)
        new = verifier.request(PROMPT, new=NEW, session=old.key.session, epoch=old.epoch + 1)
        await verifier.open(new)
        assert len((await verifier.read(new)).ids) == NEW
        assert (await verifier.read(old)).code == grpc.StatusCode.ABORTED.value[0]


async def test_its_sources_hear_that_it_is_parked_and_that_it_goes_on() -> None:
    async with running(FakeSource()) as source, quick_to_park() as verifier:
        request = verifier.request(PROMPT, new=NEW, sources=[("drafter", source.address)])
        await parked(verifier, request)
        await eventually(lambda: source.source.ended == 1)
        await verifier.read(request)
        first, second = source.source.follows
        assert len(second.ids) > len(first.ids)
        await eventually(lambda: source.source.ended == 2)
