"""A request whose read was cancelled goes on with the device's drafts, or without a wait for them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from outrider import AsyncEdgeDrafter
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from tests.edge.toy import ToyModel

WAIT_S = 100.0
ASKED: dict[str, Any] = {"ids": (3, 1, 4), "max_tokens": 8}


class SilentOrchestrator(GenerationServicer):
    """An orchestrator that takes requests and answers none."""

    def __init__(self) -> None:
        self.address = ""
        self._starts: asyncio.Queue[generation_pb2.GenerateStart] = asyncio.Queue()

    async def start(self) -> generation_pb2.GenerateStart:
        """The start of the next request."""
        return await asyncio.wait_for(self._starts.get(), WAIT_S)

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self._starts.put_nowait((await anext(aiter(requests))).start)
        await asyncio.Event().wait()
        yield generation_pb2.GenerateResponse()


@pytest.fixture
async def cloud() -> AsyncIterator[SilentOrchestrator]:
    servicer, server = SilentOrchestrator(), grpc.aio.server()
    add_GenerationServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.mark.parametrize("is_taken", [False, True], ids=["the model is free", "another request has it"])
async def test_a_request_whose_read_was_cancelled_asks_for_waits_only_if_it_has_the_model(
    cloud: SilentOrchestrator, is_taken: bool
) -> None:
    async with AsyncEdgeDrafter(cloud.address, ToyModel(), mode="waiting") as drafter:
        stream = drafter.stream(**ASKED)
        reading = asyncio.create_task(anext(stream))
        assert (await cloud.start()).device.wait_ms > 0
        reading.cancel()
        await asyncio.wait({reading})
        if is_taken:
            other = drafter.stream(**ASKED)
            assert (await cloud.start()).device.wait_ms > 0
        reading = asyncio.create_task(anext(stream))
        resumed = await cloud.start()
        assert resumed.HasField("device") is not is_taken
        having, lacking = (other, stream) if is_taken else (stream, drafter.stream(**ASKED))
        assert having.device.trouble == ""
        assert lacking.device.trouble == "the device drafts for another request"
        reading.cancel()
        await asyncio.wait({reading})
