"""A response of server-sent events, which is never silent for long."""

import asyncio
from types import TracebackType

from starlette.types import Send

SILENCE_S = 15.0
"""Seconds without an event after which a comment is sent: proxies close connections that seem idle."""
COMMENT = b": waiting\n\n"
_ESCAPES = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
"""Characters that end no line of a stream, but that many programs take for line ends, as Python's splitlines
does; and their escapes. In JSON they stand only within strings."""

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class EventStream:
    """The events of one response: a context, in which a silence is broken by comments.

    Clients skip comments. The first event or comment sends the response's status and headers.

    Args:
        silence_s: seconds of silence until a comment is sent.
        silence: the bytes that break a silence.
    """

    def __init__(self, send: Send, silence_s: float = SILENCE_S, silence: bytes = COMMENT) -> None:
        self._send = send
        self._silence_s = silence_s
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._turns = asyncio.Lock()  # a comment and an event must not both send the status
        self.begun = False
        """Whether the status was sent: from then on an error can only be an event."""

    async def __aenter__(self) -> "EventStream":
        self._wait(self._silence_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    async def send(self, data: bytes, name: str = "") -> None:
        """Send an event with this data.

        Args:
            data: compact JSON, or a word.
            name: the event's name; empty: it has none.
        """
        head = f"event: {name}\n".encode() if name else b""
        for character, escape in _ESCAPES:
            data = data.replace(character, escape)
        await self._write(head + b"data: " + data + b"\n\n")

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        async with self._turns:
            self._last = self._loop.time()
            if not self.begun:
                self.begun = True
                await self._send(_START)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _wait(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Send a comment if nothing was sent for long; look again later."""
        left = self._last + self._silence_s - self._loop.time()
        if left > 0:
            self._wait(left)
            return
        if self._comment is None or self._comment.done():
            self._comment = asyncio.create_task(self._write(self._silence))
        self._wait(self._silence_s)
