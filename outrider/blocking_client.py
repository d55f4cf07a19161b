"""The client that blocks; see `outrider.client`."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from outrider.asking import (
    CONTROL_S,
    Model,
    addresses_in,
    ends_at,
    model_from_wire,
    patience_for,
    ping_patience_ms,
    time_left,
)
from outrider.completions import Chunk, Completion, Folding
from outrider.credentials import credentials_of
from outrider.options import Options, build_request
from outrider.resuming import Resuming
from outrider.v1 import common_pb2, explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_sync_channel
from outrider.wire.status import rpc_errors
from speculative.errors import OutriderError, Overloaded, Superseded, Unavailable, UnknownSession

if TYPE_CHECKING:
    import grpc


class Stream(Iterator[Chunk]):
    """An answer as it is committed. Iterate to its end, or `close` it, which ends the request."""

    def __init__(
        self,
        ask: "Callable[[Resuming], grpc._CallIterator[generation_pb2.GenerateResponse]]",
        resuming: Resuming,
        choices: int = 1,
    ) -> None:
        self._ask = ask
        self._resuming = resuming
        self._call = ask(resuming)
        self._folding = Folding(choices)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                return self._next()
            except (Unavailable, Overloaded, Superseded) as error:
                if self._folding.whole:  # all that was lost is the stream's own end
                    raise StopIteration from None
                pause_s = self._resuming.again(error, self._folding, time.monotonic())
                if pause_s is None:
                    raise
            time.sleep(pause_s)
            self._call = self._ask(self._resuming)

    def _next(self) -> Chunk:
        with rpc_errors():
            for response in self._call:
                self._resuming.answered()
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
        """Dials at the first call: host:port, or several of them, separated by commas, one of which is asked.

        Where that one is lost or full, a request goes on at the others, and is given up `patience_s` seconds
        after the loss: by default 30 where there are several, else at once.

        `api_key` goes with every call. `ca` is a file with the certificates of whom to believe, and makes
        connections encrypted; `cert` and `cert_key` are files with what to show, where orchestrators ask for
        it. Raises InvalidRequest where there is none to dial, or a file is not what it must be.
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

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises OutriderError."""
        return self.stream(prompt, **options).completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> Stream:
        """The answer as it is committed; the request is on its way already. Raises OutriderError."""
        request = build_request(prompt, options)
        ends = ends_at(options)

        def ask(resuming: Resuming) -> "grpc._CallIterator[generation_pb2.GenerateResponse]":
            stub = self._stubs[resuming.orchestrator]
            return stub.Generate(iter((resuming.request,)), timeout=time_left(ends), metadata=self._metadata)

        resuming = Resuming(request, len(self._stubs), self._patience_s, ends=ends)
        return Stream(ask, resuming, options.get("n") or 1)

    def cancel(self, session: str, *, tenant: str = "") -> bool:
        """Ends a session's current request; whether one was running. Raises OutriderError."""
        request = generation_pb2.CancelRequest(tenant=tenant, session=session)
        found = [self._control(stub.Cancel, request).found for stub in self._stubs]
        return any(found)

    def explain(self, session: str, *, tenant: str = "", choice: int = 0) -> explain_pb2.ExplainResponse:
        """How the last rounds of a session went, as verifiers remember it. Raises OutriderError."""
        key = common_pb2.SessionKey(tenant=tenant, session=session, choice=choice)
        refusal: OutriderError = Unavailable("no orchestrator")
        for stub in self._stubs:
            try:
                response: explain_pb2.ExplainResponse = self._control(
                    stub.Explain, explain_pb2.ExplainRequest(key=key)
                )
            except (Unavailable, UnknownSession) as error:
                refusal = error
            else:
                return response
        raise refusal

    def models(self) -> list[Model]:
        """What can be asked for, at the first orchestrator that answers. Raises OutriderError."""
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
        with rpc_errors():
            return call(request, timeout=CONTROL_S, metadata=self._metadata)

    def close(self) -> None:
        """Ends what still runs, and the connections."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
