"""Clients of an orchestrator: `Client` blocks, `AsyncClient` awaits; both ask and answer in the same words.

    with outrider.Client("127.0.0.1:50051") as client:
        print(client.generate("def fibonacci(n):", max_tokens=64, temperature=0).text)

Errors are of the OutriderError family (`speculative.errors`). Knows nothing of verifiers or drafters.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc
import grpc.aio

from outrider.completions import Choice, Chunk, Completion, Folding, Logprob, Usage
from outrider.options import Options, build_request
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel, open_sync_channel
from outrider.wire.status import rpc_errors
from speculative.errors import InvalidRequest

if TYPE_CHECKING:
    from outrider.v1.generation_pb2_grpc import GenerationAsyncStub  # a name of the type stubs only

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Logprob",
    "Model",
    "Stream",
    "Usage",
]

CONTROL_S = 10.0
"""Seconds that Cancel and ListModels may take."""
PATIENCE_MS = 10_000
"""How long an orchestrator may leave a ping unanswered: a client has nowhere else to go at once."""


@dataclass(frozen=True, slots=True)
class Model:
    """A target that can be asked for."""

    name: str
    max_length: int
    """The most ids, prompt and generated ones together."""
    vocabulary_size: int
    has_tokenizer: bool
    """Whether text prompts and stop strings are possible."""
    sources: tuple[str, ...]


class Stream(Iterator[Chunk]):
    """An answer as it is committed. Iterate to its end, or `close` it, which ends the request."""

    def __init__(self, call: "grpc._CallIterator[generation_pb2.GenerateResponse]", choices: int = 1) -> None:
        self._call = call
        self._folding = Folding(choices)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        with rpc_errors():
            for response in self._call:
                if (chunk := self._folding.add(response)) is not None:
                    return chunk
        raise StopIteration

    def completion(self) -> Completion:
        """The whole answer, waiting for what is left of it."""
        for _ in self:
            pass
        return self._folding.completion()

    def close(self) -> None:
        """Ends the request, wherever it is."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A blocking client. Safe to share between threads; close it, or use it as a context manager."""

    def __init__(self, address: str) -> None:
        """Dials host:port at the first call. Raises InvalidRequest where there is none to dial."""
        self._channel = open_sync_channel(_checked(address), patience_ms=PATIENCE_MS)
        self._stub: GenerationStub = GenerationStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises OutriderError."""
        return self.stream(prompt, **options).completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> Stream:
        """The answer as it is committed; the request is on its way already. Raises OutriderError."""
        request = build_request(prompt, options)
        call = self._stub.Generate(iter((request,)), timeout=options.get("timeout"))
        return Stream(call, options.get("n") or 1)

    def cancel(self, session: str, *, tenant: str = "") -> bool:
        """Ends a session's current request; whether one was running. Raises OutriderError."""
        request = generation_pb2.CancelRequest(tenant=tenant, session=session)
        with rpc_errors():
            response: generation_pb2.CancelResponse = self._stub.Cancel(request, timeout=CONTROL_S)
            return response.found

    def models(self) -> list[Model]:
        """What can be asked for. Raises OutriderError."""
        with rpc_errors():
            response = self._stub.ListModels(generation_pb2.ListModelsRequest(), timeout=CONTROL_S)
            return [_model(model) for model in response.models]

    def close(self) -> None:
        """Ends what still runs, and the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(AsyncIterator[Chunk]):
    """An answer as it is committed. Iterate to its end, or `close` it, which ends the request."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]",
        choices: int = 1,
    ) -> None:
        self._call = call
        self._responses = aiter(call)
        self._folding = Folding(choices)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        with rpc_errors():
            async for response in self._responses:
                if (chunk := self._folding.add(response)) is not None:
                    return chunk
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """The whole answer, waiting for what is left of it."""
        async for _ in self:
            pass
        return self._folding.completion()

    def close(self) -> None:
        """Ends the request, wherever it is."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio; to be made, used and closed inside one event loop."""

    def __init__(self, address: str) -> None:
        """Dials host:port at the first call. Raises InvalidRequest where there is none to dial."""
        self._channel = open_channel(_checked(address), patience_ms=PATIENCE_MS)
        self._stub: GenerationAsyncStub = GenerationStub(self._channel)

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises OutriderError."""
        return await self.stream(prompt, **options).completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it is committed. Raises OutriderError."""
        request = build_request(prompt, options)
        call = self._stub.Generate(iter((request,)), timeout=options.get("timeout"))
        return AsyncStream(call, options.get("n") or 1)

    async def cancel(self, session: str, *, tenant: str = "") -> bool:
        """Ends a session's current request; whether one was running. Raises OutriderError."""
        request = generation_pb2.CancelRequest(tenant=tenant, session=session)
        with rpc_errors():
            response: generation_pb2.CancelResponse = await self._stub.Cancel(request, timeout=CONTROL_S)
            return response.found

    async def models(self) -> list[Model]:
        """What can be asked for. Raises OutriderError."""
        with rpc_errors():
            response = await self._stub.ListModels(generation_pb2.ListModelsRequest(), timeout=CONTROL_S)
            return [_model(model) for model in response.models]

    async def close(self) -> None:
        """Ends what still runs, and the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _checked(address: str) -> str:
    if not address.strip():
        raise InvalidRequest("the address is empty; give an orchestrator's host:port")
    return address


def _model(model: generation_pb2.Model) -> Model:
    return Model(
        name=model.name,
        max_length=model.max_length,
        vocabulary_size=model.vocabulary_size,
        has_tokenizer=model.has_tokenizer,
        sources=tuple(model.sources),
    )
