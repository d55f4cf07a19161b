"""The HTTP server: bound before anything is dialled, run on the loop that the process has."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from orchestrator.front.http.limits import SlowHeaders, bounded
from orchestrator.front.http.origins import Origins
from orchestrator.front.http.tls import serving
from outrider.wire.tls import Certificates
from speculative.errors import Unavailable

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
MANY = 10_000
STOP_S = 1
"""For answers that are still on their way once all requests have ended."""


class _Server(uvicorn.Server):
    """Signals are the process's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFront:
    """Serves an application at `bind`, host:port. Raises Unavailable where it cannot be bound.

    Args:
        certificates: shown to clients; None: plain.
        most: connections at once; what comes beyond is closed.
    """

    def __init__(
        self, app: ASGIApp, bind: str, certificates: Certificates | None = None, most: int = MANY
    ) -> None:
        host, _, port = bind.rpartition(":")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            self._socket = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)
        except OSError as error:
            raise Unavailable(f"cannot serve HTTP on {bind}: {error}") from error
        scheme = "http" if certificates is None else "https"
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                Origins(app),
                http=bounded(SlowHeaders, most),
                ssl_context_factory=None if certificates is None else serving(certificates),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answers from now on; who has connected already is not forgotten."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")

    async def stop(self) -> None:
        """Takes no more, and ends what is still open within some seconds."""
        self._server.should_exit = True
        if self._task is None:
            self._socket.close()
            return
        _, late = await asyncio.wait((self._task,), timeout=1.5 * STOP_S)
        for task in late:
            log.warning("the HTTP server did not stop")
            task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
