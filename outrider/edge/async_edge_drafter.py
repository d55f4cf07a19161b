"""The asyncio client whose requests a device drafts for; see `outrider.edge`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from grpc_health.v1 import health_pb2

from outrider.client import AsyncClient, AsyncStream, Chunk, Completion
from outrider.client.endpoints import ends_at, time_left
from outrider.client.options import Options
from outrider.client.resuming import Resuming
from outrider.edge.backends import DraftModel
from outrider.edge.controller import Preference
from outrider.edge.drafted_request import DeviceControls, DraftedRequest, Ping
from outrider.edge.drafting import DraftingThread
from outrider.edge.local_answer import LocalCompletion, LocalRequest, LocalStream
from outrider.edge.offer import PATIENCE_S, EdgeOptions, offer, renew, shown_to, start_drafting
from outrider.edge.outbox import AsyncOutbox, call_in
from outrider.edge.transports import HEALTH
from outrider.v1 import generation_pb2
from speculative.errors import OutriderError

if TYPE_CHECKING:
    import grpc.aio

    Call = grpc.aio.StreamStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]


class AsyncDraftedCall(AsyncIterator[generation_pb2.GenerateResponse]):
    """One stream of a request inside an event loop; the asyncio counterpart of `DraftedCall`."""

    def __init__(
        self,
        call: "Call",
        outbox: AsyncOutbox,
        received: Callable[[generation_pb2.GenerateResponse], None],
        lost: Callable[[], None],
    ) -> None:
        self._call = call
        self._responses = aiter(call)
        self._outbox = outbox
        self._received = received
        self._lost = lost

    async def __anext__(self) -> generation_pb2.GenerateResponse:
        try:
            response: generation_pb2.GenerateResponse = await anext(self._responses)
        except BaseException:
            self._outbox.close()
            self._lost()
            raise
        self._received(response)
        return response

    def cancel(self) -> None:
        """Ends the stream, which cancels the request."""
        self._call.cancel()
        self._outbox.close()
        self._lost()


class AsyncEdgeStream(DeviceControls, AsyncStream):
    """An answer as it is generated, while the device drafts ahead; see `AsyncStream`."""

    def __init__(
        self,
        ask: "Callable[[Resuming], AsyncDraftedCall]",
        resuming: Resuming,
        choices: int,
        request: DraftedRequest,
        drafting: DraftingThread,
    ) -> None:
        self._request = request
        self._drafting = drafting
        super().__init__(ask, resuming, choices)  # type: ignore[arg-type]  # it iterates and cancels, as gRPC's call

    async def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream. `device` is final afterwards."""
        completion = await super().completion()
        await asyncio.to_thread(self._drafting.idle)
        return completion

    async def __anext__(self) -> Chunk:
        try:
            return await super().__anext__()
        except BaseException:
            self._drafting.release(self._request)
            raise

    def close(self) -> None:
        """Cancels the request."""
        super().close()
        self._drafting.release(self._request)

    def __del__(self) -> None:
        self._drafting.release(self._request)


class AsyncEdgeDrafter(AsyncClient):
    """`EdgeDrafter` for asyncio. Make, use and close it inside one event loop.

    `async with` waits until the local model is open. Requests before that are answered without drafts.
    """

    def __init__(
        self,
        address: str,
        draft_with: str | DraftModel,
        *,
        preference: str = Preference.BALANCED,
        mode: str | None = None,
        vocabulary: str | Path | None = None,
        patience_s: float = PATIENCE_S,
        wait_for_ready: bool = True,
        **access: Any,
    ) -> None:
        """Takes the arguments of EdgeDrafter. Raises InvalidRequest for invalid arguments."""
        self._options = EdgeOptions(preference, mode)
        super().__init__(address, patience_s=patience_s, **access)
        self._wait_for_ready = wait_for_ready
        self._pings: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._drafting = start_drafting(draft_with, vocabulary)
        self.device_enabled = True
        """Whether later requests use the device; False saves battery power and network traffic."""

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncEdgeStream:
        """The answer as it is generated. Raises OutriderError."""
        drafting, ends = self._drafting, ends_at(options)
        offered = offer(drafting, self._options, self.device_enabled, prompt, options)
        request = offered.request

        def ask(resuming: Resuming) -> AsyncDraftedCall:
            renew(drafting, request, resuming.request)
            number = resuming.orchestrator
            outbox = AsyncOutbox(resuming.request)
            request.ping = self._pinging(number)
            received = shown_to(drafting, request, resuming.request, outbox.put)
            generate, timeout = self._stubs[number].Generate, time_left(ends)
            with self._streams.beginning_a_call():
                call = generate(outbox, timeout=timeout, metadata=self._metadata)
            return AsyncDraftedCall(call, outbox, received, lambda: drafting.lost(request))

        places, patience_s, ready = len(self._stubs), self._patience_s, self._wait_for_ready
        resuming = Resuming(offered.message, places, patience_s, ends=ends, wait_for_ready=ready)
        stream = AsyncEdgeStream(ask, resuming, options.get("n") or 1, request, drafting)
        return self._streams.add(stream)

    async def generate_locally(
        self, prompt: str | None = None, **options: Unpack[Options]
    ) -> LocalCompletion:
        """An answer of the device's own model, without the cloud; see `EdgeDrafter.stream_locally`."""
        request = LocalRequest.of(prompt, options)
        await self.opened()
        local = LocalStream(self._drafting, request)
        try:
            return await asyncio.to_thread(local.completion)
        finally:
            local.close()

    async def opened(self) -> None:
        """Returns once the local model is open. Raises OutriderError if the model cannot be opened."""
        await asyncio.to_thread(self._drafting.wait_open)

    async def close(self) -> None:
        """Cancels running requests, closes all connections and frees the local model."""
        for task in self._pings:
            task.cancel()
        await super().close()
        await asyncio.to_thread(self._drafting.close)

    def _pinging(self, number: int) -> Ping:
        """A function that measures a round trip to an orchestrator; for any thread, and never blocks."""
        check = self._channels[number].unary_unary(
            HEALTH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def measure(done: Callable[[float], None]) -> None:
            began = time.monotonic()
            try:
                await self._control(check, health_pb2.HealthCheckRequest())
            except OutriderError:
                return  # the request's own stream tells what is wrong
            done(1000 * (time.monotonic() - began))

        def begin(done: Callable[[float], None]) -> None:
            task = asyncio.create_task(measure(done))
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)

        return lambda done: call_in(self._loop, begin, done)

    async def __aenter__(self) -> Self:
        try:
            await self.opened()
        except BaseException:
            await self.close()
            raise
        return self
