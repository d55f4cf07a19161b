"""Frames are RFC 6455's, and an error is a close frame or a refused handshake."""

import hashlib
import socket
import struct
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from outrider.edge.websocket import BINARY, WebAddress, WebSocketCall, frame, read_frame
from outrider.v1 import generation_pb2
from speculative.errors import InvalidRequest, OutriderError, Overloaded, Unauthenticated, Unavailable

WAIT_S = 20.0
MASK = b"\x37\xfa\x21\x3d"
FINISHED = generation_pb2.GenerateResponse(finished=generation_pb2.GenerateFinished(seed=5))


def served(data: bytes, *, final: bool = True, opcode: int = BINARY) -> bytes:
    """A server's frame, which is not masked."""
    return struct.pack("!BBH", final << 7 | opcode, 126, len(data)) + data


def test_a_frame_is_that_of_the_standards_example() -> None:
    assert frame(1, b"Hello", MASK).hex() == "818537fa213d7f9f4d5158"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_a_frame_of_any_length_is_undone_by_its_mask(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    made = frame(BINARY, data, MASK)
    masked = made[len(made) - size :]
    assert bytes(byte ^ MASK[index % 4] for index, byte in enumerate(masked)) == data
    assert made[len(made) - size - 4 : len(made) - size] == MASK


@pytest.mark.parametrize(
    "data", [served(b"x" * 5)[:4], b"", b"\x82\xff" + bytes(12), b"\x82\x7f" + b"\xff" * 8]
)
def test_a_broken_frame_is_an_error(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, ValueError)):
            read_frame(ours)


@contextmanager
def server(
    *frames: bytes,
    refusal: bytes = b"",
    asked: Callable[[], object] = lambda: None,
    answered: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """URL of a server that shakes hands once, sends these frames, and hangs up.

    Args:
        asked: called before it shakes hands.
        answered: called before it hangs up.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(4096)
            asked()
            key = request.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
            guid = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            accept = b64encode(hashlib.sha1(key + guid, usedforsecurity=False).digest())
            agreed = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            agreed += b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            connection.sendall(refusal or agreed + b"".join(frames))
            answered()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        thread.join()
        listening.close()


def call(url: str) -> WebSocketCall:
    return WebSocketCall(WebAddress(url), [], 1, 10.0)


def test_a_message_in_pieces_is_put_together_and_the_end_ends() -> None:
    data = FINISHED.SerializeToString()
    ping = served(b"hi", opcode=9)
    with server(served(data[:2], final=False) + ping + served(data[2:], opcode=0)) as url:
        assert list(call(url)) == [FINISHED]


@pytest.mark.parametrize(
    ("close", "kind", "why"),
    [
        (struct.pack("!H", 4003) + b"temperature is -1", InvalidRequest, "temperature is -1"),
        (struct.pack("!H", 4008) + b"full", Overloaded, "full"),
        (struct.pack("!H", 4013), OutriderError, "code 4013"),
        (struct.pack("!H", 1001), Unavailable, "code 1001"),
        (b"", Unavailable, "code 1005"),
    ],
)
def test_a_close_frame_says_why(close: bytes, kind: type[OutriderError], why: str) -> None:
    with server(served(close, opcode=8)) as url, pytest.raises(kind, match=why):
        next(call(url))


def test_rubbish_and_hanging_up_are_a_lost_connection() -> None:
    for sent in (b"", served(b"\xff\xff\xff"), served(b"", opcode=3)):
        with server(sent) as url, pytest.raises(Unavailable, match="lost"):
            next(call(url))


def test_a_server_that_falls_silent_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.edge.websocket.SILENCE_S", 0.05)
    noticed = threading.Event()
    with server(answered=lambda: noticed.wait(WAIT_S)) as url:
        with pytest.raises(Unavailable, match="lost"):
            next(call(url))
        noticed.set()


@pytest.mark.parametrize(
    ("refusal", "kind", "why"),
    [
        (
            b'HTTP/1.1 401 No\r\nContent-Length: 38\r\n\r\n{"error": {"message": "show an key"}}  ',
            Unauthenticated,
            "show an key",
        ),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", Unavailable, "404 Not Found"),
        (
            b"HTTP/1.1 101 Switching\r\nSec-WebSocket-Accept: no\r\n\r\n",
            Unavailable,
            "does not speak WebSocket",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", Unavailable, "cannot be reached"),
    ],
)
def test_a_refused_handshake_says_why(refusal: bytes, kind: type[OutriderError], why: str) -> None:
    with server(refusal=refusal) as url, pytest.raises(kind, match=why):
        next(call(url))


def test_a_request_that_is_cancelled_while_it_dials_ends() -> None:
    dialling, cancelled = threading.Event(), threading.Event()

    def shake_hands_late() -> None:
        dialling.set()
        assert cancelled.wait(WAIT_S)

    with server(asked=shake_hands_late) as url:
        stream = call(url)
        assert dialling.wait(WAIT_S)
        stream.cancel()
        cancelled.set()
        with pytest.raises(OutriderError, match="was cancelled") as caught:
            next(stream)
        assert not isinstance(caught.value, Unavailable), "a client would ask again"


def test_places_without_a_server_are_named() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        next(call("http://127.0.0.1:9"))
    with pytest.raises(InvalidRequest, match="is not the URL"):
        WebAddress("ftp://cloud")
