"""gRPC as the services use it, over the simulated network: channels, servers and unary calls.

The generated stubs and servicers run on these as on the real ones, with messages as bytes in between.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from benchmarks.simulation.clock import Process, current
from benchmarks.simulation.network import REFUSED_S, Network
from benchmarks.simulation.streams import ServerContext, SimulatedStream, StreamCall, failure

UNAVAILABLE, DEADLINE = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED

NEVER_TWICE = "/outrider.v1.Generation/Cancel"
"""The call that never comes twice: it names no epoch, so a second one would cancel whatever runs then."""


class Server:
    """A process's server at an address; generated `add_..._to_server` functions register methods on it."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.process = process
        self.network = network
        self.methods: dict[str, Any] = {}
        self._calls: dict[_Unary, None] = {}
        network.servers[address] = self
        process.on_death.append(self._died)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignores generic handlers: the methods that are registered by name are enough."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Registers the methods of one service."""
        self.methods.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def hold_call(self, call: "_Unary") -> None:
        """Remembers a call that is being answered."""
        self._calls[call] = None

    def release_call(self, call: "_Unary") -> None:
        """Forgets a call that was answered."""
        self._calls.pop(call, None)

    def _died(self) -> None:
        """Breaks the connections of all callers that wait for an answer or hold a stream."""
        for call in self._calls:
            call.refuse("connection reset")
        for stream in [it for it in self.network.streams if self.process in (it.client, it.server)]:
            stream.break_off("connection reset")


class Channel:
    """A channel to an address from the process whose code creates it."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._process = current()
        self._address = address

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            data = request_serializer(request)
            unary = _Unary(self._network, self._process, self._address, path, data)
            return unary.answer(timeout, response_deserializer)

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any = bytes, **_: Any
    ) -> Any:
        def call(requests: Any = None, timeout: float | None = None, **_: Any) -> StreamCall:
            server = self._network.find(self._address) if self._process.alive else None
            stream = SimulatedStream(self._network, self._process, self._address, server, path)
            stream_call = StreamCall(stream, request_serializer, response_deserializer)
            stream.begin(None if requests is None else map(request_serializer, requests), timeout)
            return stream_call

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any, timeout: float | None = None, **_: Any) -> Any:
            raise NotImplementedError(f"{path} is not simulated: the toy target has no tokenizer")

        return call

    async def channel_ready(self) -> None:
        """Returns once a process listens at the address; the caller sets the time limit."""
        while True:
            await asyncio.sleep(REFUSED_S)
            if self._network.find(self._address) is not None:
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Does nothing, as a channel holds nothing."""

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Unary:
    """One unary call: its request or its answer may be lost, and the server may carry it out twice."""

    __slots__ = ("_client", "_data", "_future", "_network", "_path", "_server")

    def __init__(self, network: Network, client: Process, address: str, path: str, data: bytes) -> None:
        self._network = network
        self._client = client
        self._server: Server | None = network.find(address) if client.alive else None
        self._path = path
        self._data = data
        self._future: asyncio.Future[bytes] = network.loop.create_future()

    async def answer(self, within_s: float | None, read: Callable[[bytes], Any]) -> Any:
        """Sends the request and waits for the answer. Raises AioRpcError."""
        late = None
        if within_s is not None:
            late = self._network.loop.call_later(within_s, self._failed, failure(DEADLINE, "too late"))
        self._send()
        try:
            return read(await self._future)
        finally:
            if late is not None:
                late.cancel()

    def refuse(self, why: str) -> None:
        """Lets the client see its connection end."""
        self._network.loop.call_later(
            REFUSED_S, self._failed, failure(UNAVAILABLE, why), context=self._client.context
        )

    def _send(self) -> None:
        network, server = self._network, self._server
        if server is None:
            self.refuse("connection refused")
            return
        weather, chance = network.weather, network.way(self._client, server.process)
        if weather.lost and chance.random() < weather.lost:
            self._note("request lost")
            if chance.random() < 0.8:
                self.refuse("connection reset")
            return
        network.send(self._client, server.process, self._arrive, server)
        if weather.twice and self._path != NEVER_TWICE and chance.random() < weather.twice:
            self._note("twice")
            network.again(self._client, server.process, self._arrive, server)

    def _arrive(self, server: Server) -> None:
        if server.process.alive:
            server.hold_call(self)
            server.process.spawn(self._serve(server))
        else:  # its machine still answers messages for a closed socket
            self.refuse("connection reset")

    async def _serve(self, server: Server) -> None:
        method, context = server.methods[self._path], ServerContext(None)
        try:
            request = method.request_deserializer(self._data)
            response = await method.unary_unary(request, context)
        except grpc.aio.AbortError:
            self._reply(server, self._failed, failure(*context.status))
        else:
            self._reply(server, self._succeeded, method.response_serializer(response))
        finally:
            server.release_call(self)

    def _reply(self, server: Server, deliver: Callable[[Any], None], result: Any) -> None:
        network = self._network
        if not server.process.alive:
            return
        chance = network.way(server.process, self._client)
        if network.weather.lost and chance.random() < network.weather.lost:
            self._note("answer lost")
            self.refuse("connection reset")
            return
        network.send(server.process, self._client, deliver, result)

    def _note(self, what: str) -> None:
        if self._network.note is not None:
            self._network.note(f"{self._client.name}: {self._path.rpartition('/')[2]} {what}")

    def _succeeded(self, data: bytes) -> None:
        if not self._future.done():
            self._future.set_result(data)

    def _failed(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it as seen, as the caller may have stopped waiting
