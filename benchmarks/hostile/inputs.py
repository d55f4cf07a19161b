"""What hostile inputs are made of: raw bytes over TCP and over gRPC, and how an answer is told.

An input is a coroutine that sends something to the services' ports and returns what came back: a status, or
`held` where it only occupied something. Statuses that a client may never see count as faults.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
import grpc.aio

from benchmarks.hostile.attacked_services import Ports

Input = Callable[[Ports], Awaitable[str]]
"""Sends one hostile input and returns its outcome."""
HELD = "held"
CLOSED = "closed"
FAULTS = frozenset({"500", "INTERNAL", "UNKNOWN", "smuggled", "no HTTP"})
"""Outcomes that no input may have."""
WRITE_FAILED = "write failed"
"""Outcome of a call that the server refused while the client still wrote: grpc.aio hides the refusal."""
CLIENT_DETAILS = "Internal error from Core"
"""What grpc.aio says of such a call; a server's INTERNAL has the words of outrider.wire.status."""
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True)
class HostileClass:
    """Inputs that attack the same thing."""

    name: str
    make: Callable[[], Sequence[Input]]
    """Makes the inputs, whose bytes may be large."""
    at_once: int = 0
    """How many inputs are sent at a time; 0: as many as the benchmark's flag says."""


def post(path: str, body: bytes, headers: Iterable[str] = ()) -> Input:
    """Sends a body in one piece."""
    return http(lambda key: head("POST", path, key, [f"content-length: {len(body)}", *headers]) + body)


def json_post(path: str, **fields: object) -> Input:
    """Sends an object as JSON."""
    return post(path, json.dumps(fields).encode())


def head(method: str, path: str, key: str, headers: Iterable[str] = ()) -> bytes:
    """The head of a request with a key."""
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    return "\r\n".join([*lines, "content-type: application/json", *headers, "", ""]).encode()


def http(request: Callable[[str], bytes]) -> Input:
    """Sends bytes, made with the key, over a connection of their own; the outcome is the answer's status."""

    async def send(ports: Ports) -> str:
        reader, writer = await asyncio.open_connection(*ports.host_and_port("http"))
        try:
            return await status_of(reader, writer, request(ports.key))
        finally:
            writer.close()

    return send


async def status_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> str:
    """Sends bytes while it waits for the answer, reads the answer's head, and returns its status."""
    sending = asyncio.create_task(_send(writer, data))
    try:
        line = await reader.readline()
    except ConnectionError:
        line = b""
    finally:
        sending.cancel()
    if not line:
        return CLOSED
    parts = line.split(maxsplit=2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/"):
        return "no HTTP"
    return parts[1].decode("latin-1")


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):
        for start in range(0, len(data), 1 << 16):
            writer.write(data[start : start + (1 << 16)])
            await writer.drain()


def call(role: str, method: str, *messages: bytes, metadata: Sequence[tuple[str, str]] = ()) -> Input:
    """Calls a method of a gRPC port with these messages as bytes; the outcome is the status code's name.

    Every method is called as a stream of messages, which is the same on the wire.
    """

    async def send(ports: Ports) -> str:
        async with grpc.aio.insecure_channel(ports.addresses[role], options=UNLIMITED) as channel:
            return await outcome_of(channel, ports, method, _all(messages), metadata)

    return send


async def outcome_of(
    channel: grpc.aio.Channel,
    ports: Ports,
    method: str,
    messages: AsyncIterator[bytes],
    metadata: Sequence[tuple[str, str]] = (),
) -> str:
    """Calls a method, reads its answers, and returns the name of its status code."""
    known = (("authorization", f"Bearer {ports.key}"), *metadata)
    called: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    called = channel.stream_stream(f"/outrider.v1.{method}")
    made = called(messages, metadata=known)
    try:
        async for _ in made:
            pass
        code = await made.code()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == CLIENT_DETAILS:
            return WRITE_FAILED
        code = error.code()
    return str(code.name)


async def _all(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
