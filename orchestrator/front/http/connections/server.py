"""The HTTP server: bound before any worker is dialled, run on the process's event loop.

Its certificate may be replaced while it serves; connections are bounded in number, and end where a client
does not finish sending a request's headers.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.front.http.bodies.intake import BodyIntake
from orchestrator.front.http.connections.protocol import BoundedProtocol
from orchestrator.front.http.middleware import RequestIdMiddleware
from orchestrator.front.http.templated.response_parsers import ResponseParsers
from outrider.wire.bind_errors import bind_failure
from outrider.wire.tls import Certificates, Pem, load_pair

log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted between two other callbacks of the loop: some 2 ms."""
KEEP_ALIVE_S = 75
MOST_CONNECTIONS = 10_000
MOST_MESSAGE_BYTES = 16 * 2**20
PING_S = 20.0
"""Seconds between pings to a WebSocket's client, and seconds that the client may take to answer."""
STOP_S = 1
"""How long answers may stay on their way once all requests have ended, in seconds."""

ContextFactory = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]


class _Server(uvicorn.Server):
    """A server that leaves signals to the process, and accepts a burst of connections in pieces."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer. asyncio has one number for the kernel's queue and for what it accepts at once."""
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application at `bind`, host:port. Raises Unavailable where it cannot be bound.

    Args:
        intake: what takes bodies in; starts and ends with the server.
        parsers: what parses answers by response templates; ends with the server.
        certificates: certificates that clients see; None: connections are in plain.
        most: the most connections at once; further ones are closed.
        most_bytes: the largest message over a WebSocket, in bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        intake: BodyIntake,
        parsers: ResponseParsers,
        bind: str,
        certificates: Certificates | None = None,
        most: int = MOST_CONNECTIONS,
        most_bytes: int = MOST_MESSAGE_BYTES,
    ) -> None:
        host, _, port = bind.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (host.strip("[]"), int(port)),
                family=family,
                backlog=BACKLOG,
                dualstack_ipv6=host == "[::]" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            raise bind_failure("HTTP", bind, "orchestrator", "http_bind", error) from error
        scheme = "http" if certificates is None else "https"
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                RequestIdMiddleware(app),
                http=bounded(BoundedProtocol, most),
                ssl_context_factory=None if certificates is None else ssl_context_factory(certificates),
                ws="auto",
                ws_max_size=most_bytes,
                ws_ping_interval=PING_S,
                ws_ping_timeout=PING_S,
                ws_per_message_deflate=False,  # messages of some 40 bytes, and memory for each connection
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._intake = intake
        self._parsers = parsers
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer, clients that have connected already included."""
        self._intake.start()
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")

    async def stop(self) -> None:
        """Accept no more connections, and end those that are still open within seconds."""
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
            return
        _, late = await asyncio.wait((self._task,), timeout=1.5 * STOP_S)
        for task in late:
            log.warning("the HTTP server did not stop")
            task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._intake.stop()
        await self._parsers.stop()


def bounded(protocol: type[H11Protocol], most: int) -> type[H11Protocol]:
    """The protocol, for at most this many connections at once; further connections are closed unread."""
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

        def handle_websocket_upgrade(self, event: Any) -> None:
            super().handle_websocket_upgrade(event)
            upgraded = self.transport.get_protocol()
            lost = upgraded.connection_lost

            def connection_lost(exc: Exception | None) -> None:
                nonlocal connected
                connected -= 1
                lost(exc)

            upgraded.connection_lost = connection_lost  # this protocol hears no more of the connection

    return Bounded


def ssl_context_factory(certificates: Certificates) -> ContextFactory:
    """Makes uvicorn's TLS context, which shows each new connection what the certificate files hold then."""
    shown = certificates.current()
    newest = _context(shown)

    def refresh(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal shown, newest
        if (pem := certificates.current()) is not shown:
            shown, newest = pem, _context(pem)
        connection.context = newest

    def make(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        first = _context(shown)
        first.sni_callback = refresh  # called whether the client sent a name or not
        return first

    return make


def _context(pem: Pem) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, pem)
    if pem.ca:
        context.load_verify_locations(cadata=pem.ca.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context
