"""ASGI middleware around the routes: request ids, the framing of bodies, API keys."""

from contextlib import ExitStack
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.front.auth import DEFAULT_TENANT, Caller, Gate
from orchestrator.front.http.connections.websocket import credentials_in
from orchestrator.front.http.errors import MESSAGES_PATH, error_response
from orchestrator.front.http.field_faults import FieldRefused, quoted
from outrider.wire.incoming.http_url import named_host
from outrider.wire.origin import REQUEST_KEY, arrived, origin_of
from speculative.errors import OutriderError, PermissionDenied

_ASKING = frozenset({"http", "websocket"})
"""ASGI scope types of clients' connections."""
_BEGINNINGS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
"""Types of the ASGI messages that begin an answer and have its headers."""

ANTHROPIC_ID = "request-id"
"""The header in which Anthropic's clients look for the request's id."""

OPEN_PATHS = frozenset({"/", "/health", "/version", "/docs", "/openapi.json"})
"""Paths that need no key: for probes, and for browsers, which cannot send a key for a page."""


class RequestIdMiddleware:
    """Binds each request to its origin, and returns its id: X-Request-Id, as sent or drawn.

    It goes around everything else, so that errors carry the id, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        origin = origin_of([(key.decode("latin-1"), value) for key, value in scope["headers"]])
        arrived(origin)
        names = (REQUEST_KEY, ANTHROPIC_ID) if scope["path"].startswith(MESSAGES_PATH) else (REQUEST_KEY,)
        headers = [(name.encode(), origin.request.encode()) for name in names]

        async def send_with_id(message: Message) -> None:
            if message["type"] in _BEGINNINGS:
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class FramingMiddleware:
    """Refuses a body whose length is given in two ways, and closes the connection.

    A proxy in between may have read another length, and taken the rest of the bytes for another client's
    request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http":
            names = {name for name, _ in scope["headers"]}
            if {b"content-length", b"transfer-encoding"} <= names:
                what = "the request has both Content-Length and Transfer-Encoding; send one of them"
                response = error_response(FieldRefused(None, what), scope["path"])
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HeadMiddleware:
    """Answers HEAD, which probes and balancers send, as GET; the server below sends the headers alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class OriginMiddleware:
    """Refuses requests of web pages that are not allowed to call the API.

    A browser sends some requests of any page to any address, and only hides the responses from the page:
    without this check every page could have a server on its reader's machine compute.

    Args:
        origins: origins of pages that may call; * is any.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] in _ASKING:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._allows(origin, headers.get("host", "")):
                await error_response(_not_allowed(origin), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        """Whether pages of this origin may call; those of the API's own address always may.

        A name proves nothing: the page's owner decides which address its name stands for.
        """
        own = origin.partition("://")[2].lower() == host.lower() and _is_address(host)
        return own or origin in self._origins or "*" in self._origins


def _is_address(host: str) -> bool:
    """Whether a Host header names this machine or an address, with or without a port."""
    name = named_host(host)
    try:
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def _not_allowed(origin: str) -> PermissionDenied:
    return PermissionDenied(
        f"pages of {quoted(origin)} may not call this server; start the orchestrator with "
        "--http-origins and this origin to allow it"
    )


class AuthMiddleware:
    """ASGI middleware: checks the API key before the body is read, or the WebSocket accepted.

    The request counts as running until its response ends, a WebSocket until it is closed.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] not in _ASKING or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        peer = client[0] if client else ""
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.entered(credentials_in(scope), peer))
            except OutriderError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """The caller of a request that AuthMiddleware let in."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def owner_of(request: Request) -> str:
    """Whose turn and whose memory a request takes: the tenant's, or the address's where keys are not used."""
    tenant = caller_of(request).tenant()
    peer = request.client.host if request.client else ""
    return f"{tenant} {peer}" if tenant == DEFAULT_TENANT else tenant
