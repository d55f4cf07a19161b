"""HTTP/1.1 on one connection, with bounds on what a client may leave undone.

A client has to send a request's headers in time, and chunks of some size. Where an answer is sent before its
request is complete, the rest of the request is thrown away for a few seconds, and the connection is closed. A
client that does not take its answer loses the connection, too.
"""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from orchestrator.front.http.bodies.arriving import SENDING_S
from orchestrator.front.http.connections.frames import FrameBounds
from orchestrator.front.http.errors import openai_error
from outrider.wire.incoming.malformed import MALFORMED

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    _LoggerAdapter = logging.LoggerAdapter

MANY_CHUNKS = 256
LEAST_CHUNK = 256
"""Bytes that chunks have on average, once there are many: each one costs as much as many bytes."""
MOST_HEADERS = 16_384
"""Bytes of a request's headers: h11 takes some 10 ms of processor time to read as many."""

LARGEST_CHUNK = 1 << 30
"""Bytes of a chunk, at most: the largest message that any setting allows."""

HEADERS_END = re.compile(rb"\n\r?\n")


class ChunkedConnection(h11.Connection):
    """A connection's state, which refuses long headers, many tiny chunks, and a chunk that no body holds."""

    fault = ""
    """Why the client's bytes were refused."""
    _chunks = 0
    _bytes = 0

    def next_event(self) -> Any:
        """The next event. Raises RemoteProtocolError."""
        try:
            return self._next_event()
        except h11.RemoteProtocolError as error:
            self.fault = str(error).partition(": bytearray")[0]  # the bytes may be another client's
            raise

    def _next_event(self) -> Any:
        if self.their_state is h11.IDLE:  # h11 bounds headers only while they are incomplete
            waiting, _ = self.trailing_data
            if len(waiting) > MOST_HEADERS and HEADERS_END.search(waiting, 0, MOST_HEADERS) is None:
                raise h11.RemoteProtocolError(f"the headers have more than {MOST_HEADERS} bytes")
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MANY_CHUNKS and self._bytes < LEAST_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the body comes in too many chunks that are too small")
            # h11 tells nobody how much of a chunk is still to come.
            if event.chunk_start and getattr(self._reader, "_bytes_in_chunk", 0) > LARGEST_CHUNK:
                raise h11.RemoteProtocolError("a chunk of the body is larger than any body may be")
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        return event


class _Timer:
    """Calls something later, unless it is stopped before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], object]) -> None:
        """Begins to count, unless it counts already."""
        if self._handle is None:
            self._handle = loop.call_later(seconds, call)

    def stop(self) -> None:
        """Calls nothing any more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class _ConnectionLog(_LoggerAdapter):
    """uvicorn's log without its warnings, which any client causes as often as it likes."""

    @property
    def level(self) -> int:
        """The level of uvicorn's log, which uvicorn reads before it logs a connection."""
        return self.logger.level

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning at debug level; `send_400_response` counts and logs bytes that are no HTTP."""
        self.debug(msg, *args, **kwargs)

    def info(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log at debug level that a WebSocket was accepted."""
        self.debug(msg, *args, **kwargs)

    def exception(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log an error with its trace; text of a client that is not UTF-8 is no error of this process."""
        if isinstance(sys.exception(), UnicodeDecodeError):
            self.debug(msg, *args, **kwargs)
        else:
            super().exception(msg, *args, **kwargs)


class BoundedProtocol(H11Protocol):
    """The protocol of one connection."""

    sending_s = SENDING_S
    """Seconds for a request's headers."""
    lingering_s = 5.0
    """Seconds for the rest of a request that has its answer."""
    taking_s = 60.0
    """Seconds in which a client takes some of its answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reading = ChunkedConnection(
            h11.SERVER, self.config.h11_max_incomplete_event_size or MOST_HEADERS
        )
        self.conn = self._reading
        self.logger = _ConnectionLog(self.logger)  # type: ignore[assignment]  # a logger in all that is used
        self._headers = _Timer()
        self._rest = _Timer()
        self._taking = _Timer()
        self._answered: RequestResponseCycle | None = None
        """The request whose answer overtook it."""

    def connection_made(self, transport: Any) -> None:
        """A client has connected, and has to send headers from now on."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A client has sent bytes; h11 knows whether the headers are complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer is complete; its request may not be."""
        if self.conn.their_state is h11.SEND_BODY:
            self._answered = self.cycle
            self._rest.start(self.loop, self.lingering_s, self.transport.abort)
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Upgrades the connection to a WebSocket, with bounds, and with a log that clients cannot fill."""
        super().handle_websocket_upgrade(event)
        upgraded: Any = self.transport.get_protocol()
        upgraded.logger = _ConnectionLog(upgraded.logger)
        FrameBounds(upgraded, self.transport, self.loop, self.taking_s)

    def pause_writing(self) -> None:
        """The client takes nothing for now."""
        super().pause_writing()
        self._taking.start(self.loop, self.taking_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client takes its answer again."""
        super().resume_writing()
        self._taking.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops watching: the connection is closed."""
        super().connection_lost(exc)
        self._headers.stop()
        self._rest.stop()
        self._taking.stop()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in OpenAI's shape, where nothing was answered yet."""
        msg = f"the bytes cannot be read as HTTP/1.1: {self._reading.fault}"
        MALFORMED.note("HTTP/1.1", ":".join(map(str, self.client or ())), msg)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(openai_error(msg, "invalid_request_error")).encode()
            length = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            response = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing that its handler sends can be written any more
            self.cycle.message_event.set()
        self.transport.close()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._headers.stop()
        else:
            self._headers.start(self.loop, self.sending_s, self.transport.close)
        if self.conn.their_state is not h11.SEND_BODY or self.cycle is not self._answered:
            self._rest.stop()
