"""A client that is closed: whoever reads or begins a request is told so, also between two attempts."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc.aio
import pytest

from outrider import AsyncClient, AsyncEdgeDrafter, Client, EdgeDrafter
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from outrider.wire.status import guarded
from speculative.errors import OutriderError, QuotaExceeded
from tests.edge.toy import ToyModel

CLIENTS: list[Any] = [Client, AsyncClient, EdgeDrafter, AsyncEdgeDrafter]


class FullOrchestrator(GenerationServicer):
    """An orchestrator that has no room, and says when to come back.

    Attributes:
        asked: set when a request came.
    """

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self.asked = asyncio.Event()
        self.address = ""

    @guarded
    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        await anext(aiter(requests))
        self.asked.set()
        raise QuotaExceeded("the minute is used up", self._retry_after_s)
        yield

    async def ListModels(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


@pytest.fixture
async def full(request: pytest.FixtureRequest) -> AsyncIterator[FullOrchestrator]:
    """A full orchestrator; its parameter is the seconds after which it wants to be asked again."""
    servicer, server = FullOrchestrator(request.param), grpc.aio.server()
    add_GenerationServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


def client_of(kind: Any, address: str) -> Any:
    model = {"draft_with": ToyModel()} if "Edge" in kind.__name__ else {}
    return kind(address, patience_s=60.0, **model)


async def done(call: Callable[[], Any]) -> Any:
    """What a method of a blocking or of an asyncio client returns."""
    if inspect.iscoroutinefunction(call):
        return await call()
    return await asyncio.to_thread(call)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("full", [0.02, 59.0], indirect=True)
async def test_a_stream_ends_when_its_client_is_closed_between_two_attempts(
    full: FullOrchestrator, kind: Any
) -> None:
    client = client_of(kind, full.address)
    reading = asyncio.create_task(done(client.stream(ids=[5], max_tokens=8).completion))
    await full.asked.wait()
    await done(client.close)
    with pytest.raises(OutriderError, match="its client was closed"):
        await asyncio.wait_for(reading, 20)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_closed_client_refuses_each_call(kind: Any) -> None:
    client = client_of(kind, "127.0.0.1:1")
    await done(client.close)
    with pytest.raises(OutriderError, match="its client was closed"):
        client.stream(ids=[5], max_tokens=8)
    with pytest.raises(OutriderError, match="its client was closed"):
        await done(client.models)


@pytest.mark.parametrize("kind", [AsyncClient, AsyncEdgeDrafter])
@pytest.mark.parametrize("full", [59.0], indirect=True)
async def test_a_call_ends_when_its_client_is_closed(full: FullOrchestrator, kind: Any) -> None:
    client = client_of(kind, full.address)
    asking = asyncio.create_task(client.models())
    await full.asked.wait()
    await client.close()
    with pytest.raises(OutriderError, match="its client was closed"):
        await asyncio.wait_for(asking, 20)


def test_a_closed_drafter_dials_no_websocket() -> None:
    drafter = EdgeDrafter("http://127.0.0.1:1", ToyModel())
    drafter.close()
    with pytest.raises(OutriderError, match="its client was closed"):
        drafter.stream(ids=[5], max_tokens=8)


def test_an_interrupt_ends_a_block_whose_client_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closes, may_close = threading.Event(), threading.Event()

    def close(self: Client) -> None:
        closes.set()
        may_close.wait()

    monkeypatch.setattr(Client, "close", close)
    with suppress(KeyboardInterrupt), Client("127.0.0.1:1"):
        raise KeyboardInterrupt
    assert closes.wait(60)
    may_close.set()
