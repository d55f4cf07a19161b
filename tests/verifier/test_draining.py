"""A verifier that has to end: it announces that, takes nothing new, and ends when its sessions have left."""

import asyncio

import grpc
import grpc.aio
import pytest
from harness import serving
from ngram_lm import NgramLM

from outrider.v1 import verifier_pb2


async def test_it_says_so_in_beats_and_lets_sessions_finish_or_leave() -> None:
    target = NgramLM(max_length=4096)
    target.step_s = 0.02
    async with serving(target) as verifier:
        assert verifier.server.state().sessions == 0
        staying, leaving = verifier.request([1, 2], new=30), verifier.request([3, 4], new=2000)
        for request in (staying, leaving):
            await verifier.open(request)
        call = verifier.stub.Watch()
        await call.write(verifier_pb2.WatchRequest())
        assert not (await call.read()).beat.draining
        reading = asyncio.create_task(verifier.read(staying))
        stopping = asyncio.create_task(verifier.server.stop(100.0))
        async with asyncio.timeout(60):
            while not (await call.read()).beat.draining:
                pass
        with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
            await verifier.open(verifier.request([5]))
        assert verifier.server.state().sessions >= 1
        assert len((await reading).ids) == 30, "it went on"
        assert not stopping.done()
        assert await verifier.cancel(leaving)
        await asyncio.wait_for(stopping, 90)


async def test_it_describes_what_it_announces() -> None:
    async with serving(NgramLM(), max_sessions=7) as verifier:
        said = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
        state = verifier.server.state()
        assert (state.model, state.capacity, state.numerics) == (said.model, 7, said.numerics)
        assert state.step_s == 0
        await verifier.generate([1, 2, 3])
        assert verifier.server.state().step_s > 0
