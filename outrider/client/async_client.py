"""The asyncio client; see `outrider.client`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from outrider.client.completions import Chunk, Completion, CompletionBuilder, Model, model_from_wire
from outrider.client.endpoints import (
    CONTROL_S,
    addresses_in,
    credentials_of,
    ends_at,
    patience_for,
    ping_patience_ms,
    time_left,
)
from outrider.client.open_streams import CLOSED, OpenStreams
from outrider.client.options import Options, build_request, for_whole_answer
from outrider.client.resuming import Resuming
from outrider.v1 import common_pb2, explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.status import rpc_errors
from speculative.errors import OutriderError, Overloaded, Superseded, Unavailable, UnknownSession

if TYPE_CHECKING:
    import grpc.aio

    from outrider.v1.generation_pb2_grpc import GenerationAsyncStub  # a name of the type stubs only

    AsyncCall = grpc.aio.StreamStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class AsyncStream(AsyncIterator[Chunk]):
    """An answer as it is generated. Iterate to its end, or `close` it, which cancels the request.

    A read that is cancelled, as by `asyncio.timeout`, breaks the answer off. The next read goes on with the
    answer if the client has patience, and else raises Unavailable.
    """

    def __init__(self, ask: "Callable[[Resuming], AsyncCall]", resuming: Resuming, choices: int = 1) -> None:
        self._ask = ask
        self._resuming = resuming
        self._builder = CompletionBuilder(choices)
        self._call = ask(resuming)
        self._responses = aiter(self._call)
        self._closed = asyncio.Event()
        self._failure: OutriderError | None = None
        """Why the call gives no more messages: gRPC says so once, and then reports the answer's end."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                return await self._next()
            except (Unavailable, Overloaded, Superseded) as error:
                if self._builder.whole:  # only the end of the stream itself was lost
                    raise StopAsyncIteration from None
                if self._closed.is_set():
                    raise OutriderError(CLOSED) from error
                pause_s = self._resuming.again(error, self._builder, time.monotonic())
                if pause_s is None:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closed.wait()
            if self._closed.is_set():
                raise OutriderError(CLOSED)
            self._call = self._ask(self._resuming)
            self._responses, self._failure = aiter(self._call), None

    async def _next(self) -> Chunk:
        while (response := await self._response()) is not None:
            self._resuming.answered()
            if (chunk := self._builder.add(response)) is not None:
                return chunk
        raise StopAsyncIteration

    async def _response(self) -> generation_pb2.GenerateResponse | None:
        """The call's next message; None at its end. Raises OutriderError, also where an earlier read did."""
        if self._failure is not None:
            raise self._failure
        try:
            with rpc_errors():
                return await anext(self._responses, None)
        except OutriderError as error:
            self._failure = error
            raise
        except asyncio.CancelledError:  # which cancels the call
            self._failure = Unavailable("the answer broke off, because a read of it was cancelled; ask again")
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._failure = OutriderError(CLOSED)  # the call was cancelled, and not the task that reads it
            raise self._failure from None

    async def completion(self) -> Completion:
        """The whole answer; reads what is left of the stream."""
        async for _ in self:
            pass
        return self._builder.completion()

    def close(self) -> None:
        """Cancels the request, which may have moved to another orchestrator."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A client for asyncio. Make, use and close it inside one event loop."""

    def __init__(
        self,
        address: str,
        *,
        patience_s: float | None = None,
        api_key: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        cert_key: str | Path | None = None,
    ) -> None:
        """Takes the arguments of Client."""
        addresses = addresses_in(address)
        self._patience_s = patience_for(addresses, patience_s)
        credentials = credentials_of(api_key, ca, cert, cert_key)
        self._metadata = credentials.metadata
        patience_ms = ping_patience_ms(addresses)
        self._channels = [
            open_channel(one, patience_ms=patience_ms, certificates=credentials.certificates)
            for one in addresses
        ]
        self._stubs: list[GenerationAsyncStub] = [GenerationStub(channel) for channel in self._channels]
        self._streams = OpenStreams()

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer to one request. Raises OutriderError."""
        return await self.stream(prompt, **for_whole_answer(options)).completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it is generated. Raises OutriderError."""
        request = build_request(prompt, options)
        ends = ends_at(options)

        def ask(resuming: Resuming) -> "AsyncCall":
            stub = self._stubs[resuming.orchestrator]
            messages, timeout = iter((resuming.request,)), time_left(ends)
            with self._streams.beginning_a_call():
                return stub.Generate(messages, timeout=timeout, metadata=self._metadata)

        resuming = Resuming(request, len(self._stubs), self._patience_s, ends=ends)
        return self._streams.add(AsyncStream(ask, resuming, options.get("n") or 1))

    async def cancel(self, session: str, *, tenant: str = "") -> bool:
        """Cancels a session's request; returns whether one was running.

        Raises OutriderError: Unavailable where one cannot be asked and no other has the request.
        """
        request = generation_pb2.CancelRequest(tenant=tenant, session=session)
        refusal, found = None, False
        for stub in self._stubs:
            try:
                found |= (await self._control(stub.Cancel, request)).found
            except Unavailable as error:
                refusal = error
        if refusal is not None and not found:
            raise refusal
        return found

    async def explain(
        self, session: str, *, tenant: str = "", choice: int = 0, nodes: bool = False
    ) -> explain_pb2.ExplainResponse:
        """The last rounds of a session, from the verifiers' logs; with nodes and tokens if `nodes`.

        Raises OutriderError.
        """
        key = common_pb2.SessionKey(tenant=tenant, session=session, choice=choice)
        refusal: OutriderError = Unavailable("no orchestrator")
        for stub in self._stubs:
            try:
                response: explain_pb2.ExplainResponse = await self._control(
                    stub.Explain, explain_pb2.ExplainRequest(key=key, nodes=nodes)
                )
            except (Unavailable, UnknownSession) as error:
                refusal = error
            else:
                return response
        raise refusal

    async def models(self) -> list[Model]:
        """Lists the models served, from the first orchestrator that answers. Raises OutriderError."""
        refusal: OutriderError = Unavailable("no orchestrator")
        for stub in self._stubs:
            try:
                response = await self._control(stub.ListModels, generation_pb2.ListModelsRequest())
            except Unavailable as error:
                refusal = error
            else:
                return [model_from_wire(model) for model in response.models]
        raise refusal

    async def _control(self, call: Callable[..., Any], request: object) -> Any:
        with self._streams.beginning_a_call(), rpc_errors():
            return await call(request, timeout=CONTROL_S, metadata=self._metadata)

    async def close(self) -> None:
        """Cancels running requests and closes all connections."""
        self._streams.close()
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
