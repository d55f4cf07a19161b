"""How much a client may send, and how long it may take over it."""

import asyncio
import json
from typing import Any

import h11
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.front.http.errors import shape

SENDING_S = 30.0
"""For a request's headers, and again for its body."""


class BodyLimit:
    """Refuses bodies that are too large or too slow, before any of it is read as JSON."""

    sending_s = SENDING_S

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        deadline, size, complete = loop.time() + self.sending_s, 0, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:  # what comes now is the client's leaving
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body was not here within {self.sending_s:g} s") from error
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self._most_bytes:
                raise HTTPException(413, f"the body has more than {self._most_bytes} bytes")
            return message

        await self._app(scope, limited, send)


class SlowHeaders(H11Protocol):
    """Ends connections whose request's headers do not come to an end."""

    sending_s = SENDING_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected, and is to ask for something."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Whether it was the end of the headers, h11 knows."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to be watched."""
        super().connection_lost(exc)
        self._stop()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered in OpenAI's shape, where nothing else has been answered."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(shape(msg, "invalid_request_error")).encode()
            length = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            response = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.sending_s, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded(protocol: type[H11Protocol], most: int) -> type[H11Protocol]:
    """The same, for so many connections at once; what comes beyond is closed unheard."""
    connected = 0

    class Bounded(protocol):  # type: ignore[misc, valid-type]  # a class made from a class
        _counted = False

        def connection_made(self, transport: Any) -> None:
            nonlocal connected
            if connected >= most:
                transport.abort()
                return
            connected += 1
            self._counted = True
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            nonlocal connected
            if self._counted:
                connected -= 1
                super().connection_lost(exc)

    return Bounded
