"""ASGI middleware around the routes: request ids, API keys, and bounds on bodies."""

import asyncio
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.front.auth import Caller, Gate
from orchestrator.front.http.errors import error_response
from outrider.wire.keys import HEADER
from outrider.wire.origin import REQUEST_KEY, arrived, origin_of
from speculative.errors import OutriderError

OPEN_PATHS = frozenset({"/health", "/version"})
"""Paths that need no key, for probes."""
SENDING_S = 30.0
"""How long a client may take to send a request's headers, and again to send its body, in seconds."""


class RequestIdMiddleware:
    """Binds each request to its origin, and returns its id: X-Request-Id, as sent or drawn.

    It goes around everything else, so that errors carry the id, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = origin_of([(key.decode("latin-1"), value) for key, value in scope["headers"]])
        arrived(origin)
        header = (REQUEST_KEY.encode(), origin.request.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class AuthMiddleware:
    """ASGI middleware: checks the API key before the body is read.

    The request counts as running until its response ends.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        peer = client[0] if client else ""
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.entered(Headers(scope=scope).get(HEADER), peer))
            except OutriderError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """The caller of a request that AuthMiddleware let in."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


class BodyLimitMiddleware:
    """Refuses bodies that are too large or too slow, before any of a body is read as JSON."""

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
            if complete:  # a message after the body says that the client leaves
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
