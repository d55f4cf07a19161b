"""What an orchestrator spends on started streams on which nothing is sent: memory and processor time."""

import asyncio
import base64
import os
import time
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from benchmarks.http.front_clients import PROMPT, MeasuredOrchestrator, until_ready
from outrider.edge.websocket import BINARY, PATH, SUBPROTOCOL, frame
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel

ARMS = ("grpc_without_device", "grpc", "websocket")
TOKENS = 1 << 16
"""Most tokens of an answer; none comes while the streams are measured."""
WARM = 16
"""Streams that are opened before the measurement: the first ones load code."""


async def idle_cost(
    orchestrator: MeasuredOrchestrator, arm: str, streams: int, seconds: float
) -> dict[str, float]:
    """Memory and processor time of `streams` started streams of one arm."""
    await until_ready(orchestrator)
    async with AsyncExitStack() as held:
        stub: Any = GenerationStub(await held.enter_async_context(open_channel(orchestrator.address)))
        for _ in range(WARM):
            await _open(held, stub, orchestrator.http, arm)
        before_mb = orchestrator.resident_mb
        for _ in range(streams):
            await _open(held, stub, orchestrator.http, arm)
        cpu_s, began = orchestrator.cpu_s, time.perf_counter()
        await asyncio.sleep(seconds)
        used = (orchestrator.cpu_s - cpu_s) / (time.perf_counter() - began)
        grown_mb = orchestrator.resident_mb - before_mb
    return {
        "kib_per_stream": round(grown_mb * 1024 / streams, 1),
        "cpu_us_per_stream_second": round(1e6 * used / streams, 2),
    }


async def _open(held: AsyncExitStack, stub: Any, http: str, arm: str) -> None:
    """Opens a stream and returns when its first message has come; `held` ends the stream."""
    start = generation_pb2.GenerateStart(text=PROMPT, max_tokens=TOKENS)
    start.speculation.enabled = True
    if arm != "grpc_without_device":
        start.device.wait_ms = 50
    request = generation_pb2.GenerateRequest(start=start)
    if arm == "websocket":
        await _open_websocket(held, http, request)
        return
    call = stub.Generate()
    held.callback(call.cancel)
    await call.write(request)
    _check(arm, await call.read())


async def _open_websocket(held: AsyncExitStack, http: str, request: generation_pb2.GenerateRequest) -> None:
    address = urlsplit(http)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    held.callback(writer.close)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [f"GET {PATH} HTTP/1.1", f"Host: {address.netloc}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
    writer.write("\r\n".join([*lines, f"Sec-WebSocket-Protocol: {SUBPROTOCOL}", "", ""]).encode())
    await reader.readuntil(b"\r\n\r\n")
    writer.write(frame(BINARY, request.SerializeToString(), os.urandom(4)))
    _, size = await reader.readexactly(2)
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2), "big")
    _check("websocket", generation_pb2.GenerateResponse.FromString(await reader.readexactly(size)))


def _check(arm: str, response: generation_pb2.GenerateResponse) -> None:
    """Raises RuntimeError unless the stream has started, and has its device where it asked for one."""
    wants_device = arm != "grpc_without_device"
    started = response.started
    if not response.HasField("started") or started.HasField("device") is not wants_device:
        raise RuntimeError(f"the stream did not start as it should: {response}")
    if started.device.refused:
        raise RuntimeError(f"the device was refused: {started.device.refused}")
