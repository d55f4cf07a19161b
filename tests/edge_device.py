"""A client whose device drafts from a script: over gRPC or over a WebSocket, with the same messages."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc.aio

from outrider.client.options import build_request
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from speculative.hashing import prefix_hash

Script = Callable[[tuple[int, ...]], Sequence[generation_pb2.DeviceDrafts]]
"""What the device sends once the client has these ids, prompt included."""


class Wire(Protocol):
    """One Generate stream, whatever carries it."""

    async def send(self, request: generation_pb2.GenerateRequest) -> None: ...

    def responses(self) -> AsyncIterator[generation_pb2.GenerateResponse]: ...


class OverGrpc:
    """A Generate stream over gRPC."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, request: generation_pb2.GenerateRequest) -> None:
        # The answer may have ended meanwhile; what is left of it can still be read.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def done(self) -> None:
        """Sends nothing more; the answer goes on."""
        await self._call.done_writing()

    async def responses(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in self._call:
            yield response


@asynccontextmanager
async def over_grpc(address: str) -> AsyncIterator[OverGrpc]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = GenerationStub(channel).Generate()  # type: ignore[no-untyped-call]  # a stub of either kind
        try:
            yield OverGrpc(call)
        finally:
            call.cancel()


def request_of(prompt: Sequence[int], **options: Any) -> generation_pb2.GenerateRequest:
    """A request with a device."""
    wait_ms = options.pop("wait_ms", 0)
    request = build_request(None, {"ids": prompt, **options})  # type: ignore[typeddict-item]
    request.start.device.wait_ms = wait_ms
    return request


def window(before: Sequence[int], ids: Sequence[int], **fields: Any) -> generation_pb2.DeviceDrafts:
    """A chain that continues the ids `before`."""
    survival = bytes([250] * len(ids))
    return generation_pb2.DeviceDrafts(
        base=len(before), prefix_hash=prefix_hash(before), ids=ids, survival=survival, **fields
    )


class Answer:
    """What came of a request with a device."""

    def __init__(self) -> None:
        self.started = generation_pb2.GenerateStarted()
        self.ids: list[int] = []
        self.sources: list[str] = []
        self.finished = generation_pb2.GenerateFinished()


async def draft_along(wire: Wire, request: generation_pb2.GenerateRequest, script: Script) -> Answer:
    """Sends the request, and what the script says after each message; returns the whole answer."""
    answer, prompt = Answer(), tuple(request.start.ids.ids)
    await wire.send(request)
    async for response in wire.responses():
        match response.WhichOneof("body"):
            case "started":
                answer.started = response.started
            case "tokens":
                tokens = response.tokens
                assert tokens.position == len(prompt) + len(answer.ids)
                answer.ids += tokens.ids
                names = ("target", *answer.started.source_names)
                answer.sources += [names[index] for index in tokens.token_sources]
                if not answer.started.device.refused:
                    assert tokens.prefix_hash == prefix_hash((*prompt, *answer.ids))
            case "finished":
                answer.finished = response.finished
                break
        for drafts in script((*prompt, *answer.ids)):
            await wire.send(generation_pb2.GenerateRequest(drafts=drafts))
    return answer


class OverWebSocket:
    """Generate streams over a WebSocket, one after the other."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    async def send(self, request: generation_pb2.GenerateRequest) -> None:
        await self.socket.send(request.SerializeToString())

    async def responses(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for data in self.socket:
            response = generation_pb2.GenerateResponse.FromString(data)
            yield response
            if response.HasField("finished"):
                return


@asynccontextmanager
async def over_websocket(http: str, *subprotocols: str, **options: Any) -> AsyncIterator[OverWebSocket]:
    """A WebSocket to an HTTP front; `subprotocols` come beside that of the contract."""
    from websockets.asyncio.client import connect

    offered = ["outrider.v1", *subprotocols]
    url = f"ws{http.removeprefix('http')}/v1/generate"
    async with connect(url, subprotocols=offered, compression=None, proxy=None, **options) as socket:
        assert socket.subprotocol == "outrider.v1"
        yield OverWebSocket(socket)
