"""Held streams over the simulated network, in order until a side or the connection ends them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Self

import grpc
import grpc.aio

from benchmarks.simulation.clock import Process
from benchmarks.simulation.network import REFUSED_S, Network

WINDOW = 8
"""Unread messages on the way before the sender waits."""
END = None


def failure(
    code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.AioRpcError:
    """The exception that a failed call raises."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


class Pipe:
    """One direction of a stream."""

    def __init__(self, network: Network, sender: Process, receiver: Process) -> None:
        self._network = network
        self._sender = sender
        self._receiver = receiver
        self._arrived: deque[bytes | None] = deque()
        self._line = network.line(sender, receiver)
        self._unread = 0
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self.failed: BaseException | None = None
        """The exception that the receiver gets after it has read all arrived messages."""

    def send(self, data: bytes | None) -> None:
        """Sends a message behind all earlier ones; None ends the pipe."""
        if not self._sender.alive:
            return
        self._unread += 1
        when = self._line.behind(self._network.arrival(self._sender, self._receiver))
        self._network.at(when, self._receiver, self._arrive, data)

    def last(self, deliver: Callable[..., None], *args: Any) -> None:
        """Calls `deliver` at the receiver behind all messages sent before."""
        when = self._line.behind(self._network.arrival(self._sender, self._receiver))
        self._network.at(when, self._receiver, deliver, *args)

    async def room(self) -> None:
        """Returns once fewer than WINDOW messages are unread."""
        while self._unread >= WINDOW:
            self._writing = self._network.loop.create_future()
            await self._writing

    async def receive(self) -> bytes | None:
        """The next message; None at the end. Raises `failed` where no message will come."""
        while not self._arrived:
            if self.failed is not None:
                raise self.failed
            self._reading = self._network.loop.create_future()
            await self._reading
        data = self._arrived.popleft()
        self._unread -= 1
        _wake(self._writing)
        return data

    def fail(self, error: BaseException) -> None:
        """Ends the pipe with an exception; no further message will be read."""
        if self.failed is None:
            self.failed = error
            _wake(self._reading)

    def _arrive(self, data: bytes | None) -> None:
        if self.failed is not None:  # the receiver is gone, which the sender cannot know
            self._unread -= 1
            _wake(self._writing)
            return
        self._arrived.append(data)
        _wake(self._reading)


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class ServerContext:
    """The context that a servicer's method gets beside its request."""

    def __init__(self, stream: "SimulatedStream | None", write: Callable[[Any], bytes] | None = None) -> None:
        self.status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] = (grpc.StatusCode.OK, "", ())
        self._stream = stream
        self._write = write

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Ends the call with this status."""
        self.status = (code, details, trailing_metadata)
        raise grpc.aio.AbortError()

    async def write(self, message: Any) -> None:
        """Sends one response of a stream."""
        assert self._stream is not None
        assert self._write is not None
        await self._stream.down.room()
        self._stream.down.send(self._write(message))

    def time_remaining(self) -> float | None:
        """Seconds until the call's deadline; None without one."""
        ends = None if self._stream is None else self._stream.ends
        return None if ends is None or self._stream is None else ends - self._stream.network.loop.now

    def invocation_metadata(self) -> tuple[()]:
        """No metadata: only requests are sent."""
        return ()

    def auth_context(self) -> dict[str, Any]:
        """No certificates: the simulated network has none."""
        return {}

    def peer(self) -> str:
        """The name of every peer."""
        return "simulated"


class SimulatedStream:
    """One held call; the client reads `down`, the server reads `up`."""

    def __init__(self, network: Network, client: Process, address: str, server: Any, path: str) -> None:
        self.network = network
        self.client = client
        self.address = address
        self.found = server
        self.server: Process = client if server is None else server.process
        self.path = path
        self.up = Pipe(network, client, self.server)
        self.down = Pipe(network, self.server, client)
        self.ends: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False

    def begin(self, requests: Iterable[bytes] | None, timeout: float | None) -> None:
        """Dials and sends the requests that the caller already has."""
        loop = self.network.loop
        if timeout is not None:
            self.ends = loop.now + timeout
            loop.call_later(timeout, self._late, context=self.client.context)
        if self.found is None:
            loop.call_later(REFUSED_S, self._lost, "connection refused", context=self.client.context)
            return
        self.network.streams[self] = None
        self.up.last(self._serve)
        if requests is not None:
            for data in requests:
                self.up.send(data)
            self.up.send(END)

    def break_off(self, why: str, unheard_s: float = 0.0) -> None:
        """Breaks the connection for both sides; the server hears of it `unheard_s` seconds later."""
        if self in self.network.streams:
            del self.network.streams[self]
            self.network.drop_connection(self.client, self.server)
            self.network.loop.call_later(REFUSED_S, self._lost, why, context=self.client.context)
            self.network.loop.call_later(REFUSED_S + unheard_s, self._hang_up, context=self.server.context)

    def cancel(self) -> None:
        """Ends the call at the client's wish."""
        self.down.fail(asyncio.CancelledError())
        if self in self.network.streams:
            del self.network.streams[self]
            if self.client.alive:
                self.up.last(self._hang_up)

    def _late(self) -> None:
        if self.down.failed is None and not self._over:
            self.down.fail(failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            if self in self.network.streams:
                del self.network.streams[self]
                self.up.last(self._hang_up)

    def _lost(self, why: str) -> None:
        self.down.fail(failure(grpc.StatusCode.UNAVAILABLE, why))

    def _hang_up(self) -> None:
        """Ends the call at the server, as the client is gone."""
        self.up.fail(asyncio.CancelledError())
        if self._task is not None:
            self._task.cancel()
        self._over = True

    def _serve(self) -> None:
        if not self._over and self.server.alive:
            self._task = self.server.spawn(self._answer())

    async def _answer(self) -> None:
        method = self.found.methods[self.path]
        context = ServerContext(self, method.response_serializer)
        try:
            answered = method.stream_stream(self._requests(method.request_deserializer), context)
            if hasattr(answered, "__aiter__"):
                async with aclosing(answered) as responses:
                    async for response in responses:
                        await self._respond(method.response_serializer(response))
            else:
                await answered
        except grpc.aio.AbortError:
            self._ended(failure(*context.status))
        else:
            self._ended(None)

    async def _respond(self, data: bytes) -> None:
        await self.down.room()
        self.down.send(data)
        often = self.network.weather.stutter
        chance = self.network.way(self.server, self.client)
        if often and self.path.endswith("Watch") and chance.random() < often:
            self.down.send(data)

    async def _requests(self, read: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while (data := await self.up.receive()) is not END:
            yield read(data)

    def _ended(self, error: Exception | None) -> None:
        """Ends the call after the server's last response."""
        if self in self.network.streams and self.server.alive:
            del self.network.streams[self]
            if error is None:
                self.down.send(END)
            else:
                self.down.last(self.down.fail, error)


class StreamCall:
    """The client's side of a held call, with the interface of grpc.aio."""

    def __init__(
        self, stream: SimulatedStream, write: Callable[[Any], bytes], read: Callable[[bytes], Any]
    ) -> None:
        self._stream = stream
        self._write = write
        self._read = read
        self.on_message: Callable[[Any], None] | None = None
        """Called with each message as the client reads it."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        data = await self._stream.down.receive()
        if data is END:
            raise StopAsyncIteration
        message = self._read(data)
        if self.on_message is not None:
            self.on_message(message)
        return message

    async def write(self, message: Any) -> None:
        """Sends a request. Raises AioRpcError where the stream is over."""
        if (failed := self._stream.down.failed) is not None:
            raise failed if isinstance(failed, Exception) else asyncio.InvalidStateError("the call is over")
        await self._stream.up.room()
        self._stream.up.send(self._write(message))

    async def details(self) -> str:
        """The details of the status with which the call ended."""
        failed = self._stream.down.failed
        return failed.details() or "" if isinstance(failed, grpc.aio.AioRpcError) else ""

    def cancel(self) -> bool:
        """Cancels the call."""
        self._stream.cancel()
        return True
