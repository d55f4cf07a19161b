"""Who is let in over HTTP, before anything of a body is read."""

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.front.gate import Caller, Gate
from orchestrator.front.http.errors import error_response
from outrider.wire.keys import HEADER
from speculative.errors import OutriderError

OPEN_PATHS = frozenset({"/health", "/version"})
"""For probes, which have no key."""


class Doorkeeper:
    """Lets a request in for as long as it is answered, and tells the routes whose it is."""

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
        with ExitStack() as inside:
            try:
                caller = inside.enter_context(self._gate.entered(Headers(scope=scope).get(HEADER), peer))
            except OutriderError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Whoever was let in with it."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller
