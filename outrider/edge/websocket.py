"""A Generate stream over a WebSocket (RFC 6455) on the orchestrator's HTTP port; needs no library.

For networks that let HTTP through and nothing else. Each binary message is one message of the contract; an
error is a close frame whose code is 4000 and gRPC's number of the status.
"""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError

from outrider.v1 import generation_pb2
from outrider.wire.incoming.http_url import http_url
from speculative.errors import (
    InvalidRequest,
    OutriderError,
    Overloaded,
    PermissionDenied,
    Superseded,
    Unauthenticated,
    Unavailable,
)

PATH = "/v1/generate"
SUBPROTOCOL = "outrider.v1"
DIAL_S = 10.0
"""Seconds for the connection and the handshake."""
SILENCE_S = 60.0
"""Seconds without a byte after which the connection is lost: the server pings every 20 s."""
ERRORS = 4000
RETRY_S = 1.0
"""Seconds until a retry where there is no capacity: a close frame tells no time."""
MOST_BYTES = 8 << 20
"""The longest message that is read."""
CANCELLED = "the request was cancelled"
CONTINUED, BINARY, CLOSE, PING, PONG = 0, 2, 8, 9, 10
"""Opcodes of frames."""
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KINDS: Mapping[int, type[OutriderError]] = {
    3: InvalidRequest,
    4: Unavailable,
    7: PermissionDenied,
    10: Superseded,
    11: InvalidRequest,
    14: Unavailable,
    16: Unauthenticated,
    400: InvalidRequest,
    401: Unauthenticated,
    403: PermissionDenied,
}
"""Errors by gRPC's number of the status, or by HTTP's."""

Request = generation_pb2.GenerateRequest
Response = generation_pb2.GenerateResponse


def is_url(address: object) -> bool:
    """Whether an address is a URL; gRPC's dns:///host:port is none."""
    return isinstance(address, str) and "://" in address and not address.startswith("dns:")


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where the WebSocket is, and what a client shows there.

    Raises:
        InvalidRequest: `url` is no URL of an HTTP server.
    """

    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    context: ssl.SSLContext | None = None
    """For https; None: the system's authorities are trusted."""

    def __post_init__(self) -> None:
        if http_url(self.url) is None:
            raise InvalidRequest(
                f"{self.url!r} is not the URL of an orchestrator's HTTP API; give http://HOST:PORT or https://HOST"
            )

    def dial(self) -> socket.socket:
        """An open WebSocket. Raises Unavailable where nothing answers, or the error of the refusal."""
        split = urlsplit(self.url)
        secure = split.scheme == "https"
        host, port = split.hostname or "", split.port or (443 if secure else 80)
        try:
            connection = socket.create_connection((host, port), DIAL_S)
        except OSError as error:
            raise Unavailable(f"{self.url} cannot be reached: {error}") from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure:
                context = self.context or ssl.create_default_context()
                connection = context.wrap_socket(connection, server_hostname=host)
            self._shake_hands(connection, split.netloc, split.path.rstrip("/"))
            connection.settimeout(SILENCE_S)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unavailable(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        except OutriderError:
            connection.close()
            raise
        return connection

    def _shake_hands(self, connection: socket.socket, host: str, base: str) -> None:
        key = base64.b64encode(os.urandom(16))
        lines = [f"GET {base}{PATH} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key.decode()}", "Sec-WebSocket-Version: 13"]
        lines += [
            f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        response = http.client.HTTPResponse(_Unbuffered(connection), method="GET")  # type: ignore[arg-type]
        expected = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
        with contextlib.closing(response):  # the file that it reads, not the connection
            response.begin()
            if response.status != 101:
                raise _KINDS.get(response.status, Unavailable)(_message_of(response))
            if response.headers.get("Sec-WebSocket-Accept") != expected:
                raise Unavailable(f"{self.url} does not speak WebSocket")


class WebSocketCall(Iterator[Response]):
    """One request's stream: sends what `outgoing` yields, and yields the responses.

    Args:
        choices: number of choices of the request; the stream ends when all choices have ended.
        timeout: seconds until the request is cancelled; None: never.
    """

    def __init__(
        self, address: WebAddress, outgoing: Iterable[Request], choices: int, timeout: float | None
    ) -> None:
        self._address = address
        self._outgoing = outgoing
        self._choices = choices
        self._ends = None if timeout is None else time.monotonic() + timeout
        self._arrived: queue.SimpleQueue[Response | OutriderError | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._cancelled = False
        self._pings: dict[bytes, tuple[float, Callable[[float], None]]] = {}
        threading.Thread(target=self._run, name="outrider-websocket", daemon=True).start()

    def __next__(self) -> Response:
        left_s = None if self._ends is None else max(0.0, self._ends - time.monotonic())
        try:
            arrived = self._arrived.get(timeout=left_s)
        except queue.Empty:
            self.cancel()
            raise Unavailable("the request took longer than its timeout") from None
        if isinstance(arrived, Response):
            return arrived
        self._arrived.put(arrived)  # for a caller that asks again
        if arrived is None:
            raise StopIteration
        raise arrived

    def cancel(self) -> None:
        """Ends the stream, which cancels the request; from any thread."""
        self._cancelled = True
        self._hang_up()

    def ping(self, done: Callable[[float], None]) -> None:
        """Measures a round trip; `done` gets its milliseconds, or is never called. Never blocks for long."""
        name = os.urandom(4)
        if self._socket is not None and not self._pings:
            self._pings[name] = time.monotonic(), done
            with contextlib.suppress(OSError):
                self._send(PING, name)

    def _run(self) -> None:
        """Reads until the request has ended; the thread's function."""
        try:
            connection = self._socket = self._address.dial()
            if self._cancelled:  # while it dialled, when there was no connection to hang up
                raise OutriderError(CANCELLED)
            threading.Thread(target=self._write, name="outrider-websocket-out", daemon=True).start()
            self._read(connection)
            self._arrived.put(None)
        except OutriderError as error:
            self._arrived.put(error)
        except (OSError, ValueError, DecodeError) as error:  # the last two: what came is no message
            lost = Unavailable(f"the connection was lost: {error}")
            self._arrived.put(OutriderError(CANCELLED) if self._cancelled else lost)
        finally:
            self._hang_up()

    def _read(self, connection: socket.socket) -> None:
        left, message = self._choices, b""
        while left:
            final, opcode, data = read_frame(connection)
            if opcode == CLOSE:
                raise _closed(data)
            if opcode == PING:
                self._send(PONG, data)
            elif opcode == PONG:
                began_s, done = self._pings.pop(data, (0.0, None))
                if done is not None:
                    done(1000 * (time.monotonic() - began_s))
            elif opcode in (BINARY, CONTINUED):
                message += data
                if len(message) > MOST_BYTES:
                    raise ValueError("a message is too long")
                if final:
                    response, message = Response.FromString(message), b""
                    left -= response.WhichOneof("body") == "finished"
                    self._arrived.put(response)
            else:
                raise ValueError(f"a frame has opcode {opcode}")

    def _write(self) -> None:
        """Sends what the request yields; the thread's function."""
        with contextlib.suppress(OSError):  # the reader notices
            for message in self._outgoing:
                self._send(BINARY, message.SerializeToString())

    def _send(self, opcode: int, data: bytes) -> None:
        connection = self._socket
        if connection is not None:
            try:
                with self._sending:
                    connection.sendall(frame(opcode, data, os.urandom(4)))
            except OSError:
                self._hang_up()  # a part may have gone out, and nothing may follow it
                raise

    def _hang_up(self) -> None:
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def frame(opcode: int, data: bytes, mask: bytes) -> bytes:
    """A client's frame: final, and masked, as RFC 6455 wants it of clients."""
    size = len(data)
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0x80 | 127, size)
    repeated = (mask * (size // 4 + 1))[:size]
    masked = int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")
    return head + mask + masked.to_bytes(size, "big")


def read_frame(connection: socket.socket) -> tuple[bool, int, bytes]:
    """The next frame of a server: whether it ends its message, its opcode and its data.

    Raises:
        OSError: the connection has ended.
        ValueError: the frame is too long.
    """
    first, second = _read_exactly(connection, 2)
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack("!H", _read_exactly(connection, 2))
    elif size == 127:
        (size,) = struct.unpack("!Q", _read_exactly(connection, 8))
    if size > MOST_BYTES or second & 0x80:
        raise ValueError("a frame is masked or too long")
    return bool(first & 0x80), first & 0x0F, _read_exactly(connection, size)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            raise ConnectionError("the server has closed the connection")
        found += piece
    return bytes(found)


def _closed(data: bytes) -> OutriderError:
    """The error that a close frame stands for, before the request has ended."""
    code = struct.unpack("!H", data[:2])[0] if len(data) >= 2 else 1005
    message = data[2:].decode(errors="replace") or f"the server closed the connection with code {code}"
    number = code - ERRORS
    if number == 8:
        return Overloaded(message, RETRY_S)
    if 0 < number <= 16:
        return _KINDS.get(number, OutriderError)(message)
    return Unavailable(message)


def _message_of(response: http.client.HTTPResponse) -> str:
    """What the server says of a refused handshake."""
    text = response.read(4096)
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status} {response.reason}"


class _Unbuffered:
    """A socket whose answer is read byte by byte: what follows the handshake is left for the frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def makefile(self, mode: str) -> object:
        """A file that reads bytes, as http.client wants one."""
        return self._connection.makefile("rb", buffering=0)
