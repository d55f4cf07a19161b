"""A client that sends hostile frames over WebSockets, and checks how each connection goes on."""

import asyncio
import contextlib
from collections.abc import Iterable

import grpc

from outrider.v1 import generation_pb2
from tests.fuzz import wire_fields
from tests.fuzz.front_clients import ANSWER_S, AT_ONCE, GRPC_STATUSES, Answers, WrongAnswer, side_by_side
from tests.fuzz.fuzzed_server import FuzzedServer

FINISHED, CLOSED = "finished", "closed"
CODES = frozenset({1000, 1002, 1003, 1007, 1009}) | {
    4000 + grpc.StatusCode[name].value[0] for name in GRPC_STATUSES - {"OK"}
}
"""Codes with which a connection may be closed."""
BINARY, CLOSE = 2, 8


def frame(data: bytes, kind: int = BINARY) -> bytes:
    """One frame as clients send it, under a mask of zeros."""
    if len(data) < 126:
        length = bytes([128 | len(data)])
    elif len(data) < 1 << 16:
        length = bytes([128 | 126]) + len(data).to_bytes(2)
    else:
        length = bytes([128 | 127]) + len(data).to_bytes(8)
    return bytes([128 | kind]) + length + bytes(4) + data


LEGAL = frame(wire_fields.LEGAL[wire_fields.GENERATE])
"""A request that is answered."""


class SocketFuzzClient:
    """Sends each input over a connection of its own, AT_ONCE at a time."""

    def __init__(self, server: FuzzedServer, answers: Answers, tenant: str = "attacker") -> None:
        host, _, port = server.http.rpartition(":")
        self._host, self._port = host, int(port)
        lines = ["GET /v1/generate HTTP/1.1", "host: x", "connection: upgrade", "upgrade: websocket"]
        lines += ["sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="]
        lines += ["sec-websocket-protocol: outrider.v1", f"authorization: Bearer {server.keys[tenant]}"]
        self._handshake = "\r\n".join([*lines, "", ""]).encode()
        self._answers = answers

    async def send(self, inputs: Iterable[tuple[bool, bytes]]) -> None:
        """Sends all inputs and checks what comes back. Raises WrongAnswer.

        An input is bytes, and whether they are whole frames. If so, LEGAL follows, and one of both gets an
        answer or closes the connection with a code; else the client ends its side.
        """
        left = iter(inputs)

        async def work() -> None:
            for whole, data in left:
                self._answers.statuses[f"socket {await self._one(whole, data)}"] += 1

        await side_by_side(work, AT_ONCE)

    async def _one(self, whole: bool, data: bytes) -> str:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.timeout(ANSWER_S):
                writer.write(self._handshake)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 101 "):
                    raise WrongAnswer(f"the handshake was answered with {head[:300]!r}")
                writer.write(data + LEGAL if whole else data)
                if not whole:
                    with contextlib.suppress(OSError):  # the front may have closed by now
                        writer.write_eof()
                ended = await _end(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            ended = CLOSED
        except TimeoutError:
            raise WrongAnswer(f"no answer for {ANSWER_S:g} s: {data[:2000]!r}") from None
        finally:
            writer.close()
        if ended == CLOSED and whole:
            raise WrongAnswer(f"the connection was closed without a word, for {data[:2000]!r}")
        if isinstance(ended, int) and ended not in CODES:
            raise WrongAnswer(f"closed with {ended}, for {data[:2000]!r}")
        return str(ended)


async def _end(reader: asyncio.StreamReader) -> str | int:
    """FINISHED after the first answer, the code with which the server closes, or CLOSED without one."""
    while True:
        first, length = await reader.readexactly(2)
        if length == 126:
            length = int.from_bytes(await reader.readexactly(2))
        elif length == 127:
            length = int.from_bytes(await reader.readexactly(8))
        data = await reader.readexactly(length)
        if first & 15 == CLOSE:
            return int.from_bytes(data[:2]) if data else CLOSED
        if first & 15 == BINARY and generation_pb2.GenerateResponse.FromString(data).HasField("finished"):
            return FINISHED
