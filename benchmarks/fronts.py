"""Both front doors of one orchestrator, asked with as little client as possible; what the process costs.

A stream here is its events' times and how many ids they had. Knows nothing of figures.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import grpc.aio
from envelope import REPOSITORY

from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel

PROMPT = "def add(left, right):"


class Orchestrator:
    """An orchestrator process with both fronts, before one verifier."""

    def __init__(self, verifier: str, max_streams: int) -> None:
        command = [sys.executable, "-m", "orchestrator", "--verifier", verifier, "--max-streams"]
        command += [str(max_streams), "--http-bind", "127.0.0.1:0", "--log-level", "error"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the orchestrator did not start; its message is above")
        ready = json.loads(line)
        self.address: str = ready["address"]
        self.http: str = ready["http"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self._process.terminate()
        self._process.wait(15)

    @property
    def cpu_s(self) -> float:
        """Processor time so far, of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_mb(self) -> float:
        """Resident size now, in MiB."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise KeyError("VmRSS")


@dataclass(slots=True)
class Timed:
    """One stream, in seconds of the client's clock."""

    began: float
    events: list[float] = field(default_factory=list)
    ids: int = 0

    @property
    def first_ms(self) -> float:
        """To the first event with ids."""
        return (self.events[0] - self.began) * 1000

    @property
    def whole_ms(self) -> float:
        """To the last."""
        return (self.events[-1] - self.began) * 1000

    @property
    def gap_ms(self) -> float:
        """Between two events."""
        return (self.whole_ms - self.first_ms) / max(1, len(self.events) - 1)


class Front(Protocol):
    """One of the doors."""

    async def stream(self, tokens: int) -> Timed:
        """One request of so many ids, to its end."""

    async def held(self, tokens: int, opened: asyncio.Semaphore) -> None:
        """The same, until it is cancelled; `opened` is released once it has its first event."""

    async def close(self) -> None:
        """Ends connections."""


class HttpFront:
    """Connections of its own, kept alive; one request at a time on each."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._where = (host, int(port))
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stream(self, tokens: int) -> Timed:
        timed = Timed(time.perf_counter())
        async for event in self._events(tokens):
            ids = sum(len(choice.get("token_ids", ())) for choice in event["choices"])
            if ids:
                timed.events.append(time.perf_counter())
                timed.ids += ids
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
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(*self._where)
        asked = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "return_token_ids": True}
        body = json.dumps(asked).encode()
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
                if not data.startswith(b"data: [DONE]"):
                    yield json.loads(data.removeprefix(b"data: "))
            await reader.readline()
        except BaseException:
            writer.close()
            raise
        self._free.append((reader, writer))


class GrpcFront:
    """All streams on one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub: Any = GenerationStub(self._channel)

    async def stream(self, tokens: int) -> Timed:
        timed = Timed(time.perf_counter())
        async for response in self._call(tokens):
            if response.WhichOneof("body") == "tokens":
                timed.events.append(time.perf_counter())
                timed.ids += len(response.tokens.ids)
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
async def both(orchestrator: Orchestrator) -> AsyncIterator[dict[str, Front]]:
    """The doors by name, once a model is served."""
    fronts: dict[str, Front] = {
        "http": HttpFront(orchestrator.http),
        "grpc": GrpcFront(orchestrator.address),
    }
    try:
        await _ready(orchestrator)
        yield fronts
    finally:
        for front in fronts.values():
            await front.close()


async def _ready(orchestrator: Orchestrator) -> None:
    async with open_channel(orchestrator.address) as channel:
        stub: Any = GenerationStub(channel)
        async with asyncio.timeout(20):
            while not (await stub.ListModels(generation_pb2.ListModelsRequest())).models:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
