"""Ten thousand sessions at once, and readers that go away: refusals by name, and memory as it was before."""

import asyncio

import grpc.aio
import pytest
from harness import Verifier, eventually, serving
from ngram_lm import NgramLM

from outrider.v1 import verifier_pb2

SESSIONS = 10_000
ROOM = 32


async def status_of(verifier: Verifier, request: verifier_pb2.OpenRequest) -> tuple[grpc.StatusCode, bool]:
    """What an Open is answered with, and whether that says when to come back."""
    call = verifier.stub.Open(request, timeout=100)
    status = await call.code()
    return status, "retry-after" in dict(await call.trailing_metadata())


@pytest.mark.slow
async def test_ten_thousand_sessions_at_once_are_served_or_refused_with_a_time() -> None:
    target = NgramLM()
    target.step_s = 0.001
    async with serving(target, max_sessions=ROOM, max_running=8) as verifier:
        alone = (await verifier.generate([1, 2, 3], new=40)).ids
        held = verifier.request([1, 2, 3], new=40)
        await verifier.open(held)
        reading = asyncio.create_task(verifier.read(held))
        requests = [verifier.request([5, n % 32], new=200) for n in range(SESSIONS)]
        answers = await asyncio.gather(*(status_of(verifier, request) for request in requests))
        assert set(answers) == {(grpc.StatusCode.OK, False), (grpc.StatusCode.RESOURCE_EXHAUSTED, True)}
        assert answers.count((grpc.StatusCode.OK, False)) < SESSIONS / 2
        for request, (status, _) in zip(requests, answers, strict=True):
            if status is grpc.StatusCode.OK:
                await verifier.cancel(request)
        assert (await reading).ids == alone
        await eventually(lambda: verifier.metric("num_requests_running") == 0)
        assert target.pool.used_slots == 0
        assert (await verifier.generate([1, 2, 3], new=40)).ids == alone


async def test_a_hundred_readers_that_go_away_leave_nothing_behind() -> None:
    target = NgramLM()
    target.step_s = 0.001
    async with serving(target, orphan_grace_s=0.1, lease_s=2.0, max_running=8) as verifier:
        requests = [verifier.request([5, n % 32], new=250) for n in range(100)]
        readers = []
        for request in requests:
            await verifier.open(request)
            readers.append(asyncio.create_task(verifier.read(request)))
        await eventually(lambda: target.pool.used_slots > 0)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        table = verifier.server._table
        await eventually(lambda: not table.running and not table._by_handle)
        assert target.pool.used_slots == 0
        await eventually(lambda: not verifier.server._readers._readers)
        assert len((await verifier.generate([1, 2], new=8)).ids) == 8
