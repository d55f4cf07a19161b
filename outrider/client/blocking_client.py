"""The blocking client; see `outrider.client`."""

import threading
import time
from collections.abc import Callable, Iterator
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
from outrider.wire.channel import close_after, open_sync_channel
from outrider.wire.status import rpc_errors
from speculative.errors import OutriderError, Overloaded, Superseded, Unavailable, UnknownSession

if TYPE_CHECKING:
    import grpc


class Stream(Iterator[Chunk]):
    """An answer as it is generated. Iterate to its end, or `close` it, which cancels the request."""

    def __init__(
        self,
        ask: "Callable[[Resuming], grpc._CallIterator[generation_pb2.GenerateResponse]]",
        resuming: Resuming,
        choices: int = 1,
    ) -> None:
        self._ask = ask
        self._resuming = resuming
        self._call = ask(resuming)
        self._builder = CompletionBuilder(choices)
        self._closed = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                return self._next()
            except OutriderError as error:
                lost = isinstance(error, Unavailable | Overloaded | Superseded)
                if lost and self._builder.whole:  # only the end of the stream itself was lost
                    raise StopIteration from None
                if self._closed.is_set():
                    raise OutriderError(CLOSED) from error
                pause_s = self._resuming.again(error, self._builder, time.monotonic())
                if pause_s is None:
                    raise
            if not self._closed.wait(pause_s):
                self._call = self._ask(self._resuming)
            if self._closed.is_set():  # perhaps just now, by another thread, which cancelled the call before
                self._call.cancel()
                raise OutriderError(CLOSED)

    def _next(self) -> Chunk:
        with rpc_errors():
            for response in self._call:
                self._resuming.answered()
                if (chunk := self._builder.add(response)) is not None:
                    return chunk
        raise StopIteration

    def completion(self) -> Completion:
        """The whole answer; reads what is left of the stream."""
        for _ in self:
            pass
        return self._builder.completion()

    def close(self) -> None:
        """Cancels the request, which may have moved to another orchestrator. From any thread."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A blocking client. Safe to share between threads; close it, or use it as a context manager."""

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
        """Connects at the first call.

        Args:
            address: host:port of an orchestrator, or several with commas between them. A request goes to the
                first; where that one is lost or full, the request continues at the others.
            patience_s: seconds after a loss until a request fails. Default: 30 with several orchestrators,
                else 0.
            api_key: sent with every call.
            ca: a file with the certificates to trust; turns TLS on.
            cert: a file with the certificate to show, where orchestrators ask for one.
            cert_key: a file with the key of `cert`.

        Raises InvalidRequest for an invalid argument, and where a file does not hold what it must.
        """
        addresses = addresses_in(address)
        self._patience_s = patience_for(addresses, patience_s)
        credentials = credentials_of(api_key, ca, cert, cert_key)
        self._metadata = credentials.metadata
        patience_ms = ping_patience_ms(addresses)
        self._channels = [
            open_sync_channel(one, patience_ms=patience_ms, certificates=credentials.certificates)
            for one in addresses
        ]
        self._stubs: list[GenerationStub] = [GenerationStub(channel) for channel in self._channels]
        self._streams = OpenStreams()

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer to one request. Raises OutriderError."""
        return self.stream(prompt, **for_whole_answer(options)).completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> Stream:
        """The answer as it is generated; sends the request at once. Raises OutriderError."""
        request = build_request(prompt, options)
        ends = ends_at(options)

        def ask(resuming: Resuming) -> "grpc._CallIterator[generation_pb2.GenerateResponse]":
            stub = self._stubs[resuming.orchestrator]
            messages, timeout = iter((resuming.request,)), time_left(ends)
            with self._streams.beginning_a_call():
                return stub.Generate(messages, timeout=timeout, metadata=self._metadata)

        resuming = Resuming(request, len(self._stubs), self._patience_s, ends=ends)
        return self._streams.add(Stream(ask, resuming, options.get("n") or 1))

    def cancel(self, session: str, *, tenant: str = "") -> bool:
        """Cancels a session's request; returns whether one was running.

        Raises OutriderError: Unavailable where one cannot be asked and no other has the request.
        """
        request = generation_pb2.CancelRequest(tenant=tenant, session=session)
        refusal, found = None, False
        for stub in self._stubs:
            try:
                found |= self._control(stub.Cancel, request).found
            except Unavailable as error:
                refusal = error
        if refusal is not None and not found:
            raise refusal
        return found

    def explain(
        self, session: str, *, tenant: str = "", choice: int = 0, nodes: bool = False
    ) -> explain_pb2.ExplainResponse:
        """The last rounds of a session, from the verifiers' logs; with nodes and tokens if `nodes`.

        Raises OutriderError.
        """
        key = common_pb2.SessionKey(tenant=tenant, session=session, choice=choice)
        refusal: OutriderError = Unavailable("no orchestrator")
        for stub in self._stubs:
            try:
                response: explain_pb2.ExplainResponse = self._control(
                    stub.Explain, explain_pb2.ExplainRequest(key=key, nodes=nodes)
                )
            except (Unavailable, UnknownSession) as error:
                refusal = error
            else:
                return response
        raise refusal

    def models(self) -> list[Model]:
        """Lists the models served, from the first orchestrator that answers. Raises OutriderError."""
        refusal: OutriderError = Unavailable("no orchestrator")
        for stub in self._stubs:
            try:
                response = self._control(stub.ListModels, generation_pb2.ListModelsRequest())
            except Unavailable as error:
                refusal = error
            else:
                return [model_from_wire(model) for model in response.models]
        raise refusal

    def _control(self, call: Callable[..., Any], request: object) -> Any:
        with self._streams.beginning_a_call(), rpc_errors():
            return call(request, timeout=CONTROL_S, metadata=self._metadata)

    def close(self) -> None:
        """Cancels running requests and closes all connections. From any thread."""
        self._streams.close()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(error, self.close)
