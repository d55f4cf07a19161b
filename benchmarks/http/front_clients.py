"""The smallest clients of an orchestrator's two fronts, HTTP and gRPC, and the process that they load.

A stream is recorded as the times of its events and its number of tokens. Knows nothing of figures.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import grpc.aio

from benchmarks.shared.process_memory import resident_mb
from benchmarks.shared.process_time import processor_s
from benchmarks.shared.services import orchestrator
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel

PROMPT = "def add(left, right):"


class MeasuredOrchestrator:
    """An orchestrator process with both fronts before one verifier, and its processor time and memory."""

    def __init__(self, verifier: str, max_streams: int, *more: str) -> None:
        """Starts the process with the flags `more` and those that all measurements share."""
        flags = ["--max-streams", str(max_streams), "--http-bind", "127.0.0.1:0", "--log-level", "error"]
        self._helper = orchestrator(verifier, *flags, *more)
        self._pid = self._helper.process.pid
        self.address = self._helper.address
        self.http: str = self._helper.ready["http"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: Any) -> None:
        self._helper.__exit__(*ended)

    @property
    def cpu_s(self) -> float:
        """Processor seconds so far, of all the process's threads."""
        return processor_s(self._pid)

    @property
    def resident_mb(self) -> float:
        """Resident size of the process now, in MiB."""
        return resident_mb(self._pid)


@dataclass(slots=True)
class TimedStream:
    """One stream's number of tokens and the times of its events, in seconds of the client's clock."""

    began: float
    events: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def first_ms(self) -> float:
        """Milliseconds to the first event with tokens."""
        return (self.events[0] - self.began) * 1000

    @property
    def whole_ms(self) -> float:
        """Milliseconds to the last event."""
        return (self.events[-1] - self.began) * 1000

    @property
    def gap_ms(self) -> float:
        """Mean milliseconds between two events."""
        return (self.whole_ms - self.first_ms) / max(1, len(self.events) - 1)


class FrontClient(Protocol):
    """A client of one front."""

    async def stream(self, tokens: int) -> TimedStream:
        """Sends a request of `tokens` tokens and reads its stream to the end."""

    async def held(self, tokens: int, opened: asyncio.Semaphore) -> None:
        """Holds such a stream until this call is cancelled; releases `opened` at the stream's first event."""

    async def close(self) -> None:
        """Closes the connections."""


class HttpFrontClient:
    """Speaks HTTP over kept-alive connections of its own, one request at a time on each."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._host_and_port = (host, int(port))
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, tokens: int) -> TimedStream:
        timed = TimedStream(time.perf_counter())
        async for event in self._events(tokens):
            ids = sum(len(choice.get("token_ids", ())) for choice in event["choices"])
            if ids:
                timed.events.append(time.perf_counter())
                timed.tokens += ids
        return timed

    async def held(self, tokens: int, opened: asyncio.Semaphore) -> None:
        first = True
        async for _ in self._events(tokens):
            if first:
                opened.release()
                first = False

    async def close(self) -> None:
        for _, writer in self._free:
            writer.close()

    async def _events(self, tokens: int) -> AsyncIterator[dict[str, Any]]:
        reader, writer = (
            self._free.pop() if self._free else await asyncio.open_connection(*self._host_and_port)
        )
        request = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "return_token_ids": True}
        body = json.dumps(request).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        try:
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"HTTP answered {status!r}")
            while await reader.readline() != b"\r\n":
                pass
            while size := int(await reader.readline(), 16):  # a chunk is an event
                data = (await reader.readexactly(size + 2))[:-2]
                if not data.startswith((b":", b"data: [DONE]")):  # a comment breaks a silence
                    yield json.loads(data.removeprefix(b"data: "))
            await reader.readline()
        except BaseException:
            writer.close()
            raise
        self._free.append((reader, writer))


class GrpcFrontClient:
    """Speaks gRPC, all streams on one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub: Any = GenerationStub(self._channel)

    async def stream(self, tokens: int) -> TimedStream:
        timed = TimedStream(time.perf_counter())
        async for response in self._call(tokens):
            if response.WhichOneof("body") == "tokens":
                timed.events.append(time.perf_counter())
                timed.tokens += len(response.tokens.ids)
        return timed

    async def held(self, tokens: int, opened: asyncio.Semaphore) -> None:
        first = True
        async for _ in self._call(tokens):
            if first:
                opened.release()
                first = False

    async def close(self) -> None:
        await self._channel.close()

    def _call(self, tokens: int) -> grpc.aio.StreamStreamCall[Any, Any]:
        start = generation_pb2.GenerateStart(text=PROMPT, max_tokens=tokens)
        call: grpc.aio.StreamStreamCall[Any, Any] = self._stub.Generate(
            iter((generation_pb2.GenerateRequest(start=start),))
        )
        return call


@asynccontextmanager
async def front_clients(orchestrator: MeasuredOrchestrator) -> AsyncIterator[dict[str, FrontClient]]:
    """A client of each front by the front's name, once the orchestrator serves a model."""
    fronts: dict[str, FrontClient] = {
        "http": HttpFrontClient(orchestrator.http),
        "grpc": GrpcFrontClient(orchestrator.address),
    }
    try:
        await until_ready(orchestrator)
        yield fronts
    finally:
        for front in fronts.values():
            await front.close()


async def until_ready(orchestrator: MeasuredOrchestrator) -> None:
    """Returns once the orchestrator serves a model."""
    async with open_channel(orchestrator.address) as channel:
        stub: Any = GenerationStub(channel)
        async with asyncio.timeout(20):
            while not (await stub.ListModels(generation_pb2.ListModelsRequest())).models:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
