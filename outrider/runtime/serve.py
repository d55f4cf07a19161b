"""Runs one service as a process: bind, load, announce, serve, stop.

A process binds its port before it loads (port 0 picks a free port) and is live but not ready while it loads.
Then it prints one JSON line on standard output, after lines about the load where a parent
reads them; everything else goes to standard error. SIGTERM and SIGINT
stop the process. This module knows nothing of what a service does.
"""

import asyncio
import errno
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from outrider.runtime.lifeline import die_with_parent
from outrider.runtime.log import configure
from outrider.runtime.metrics import Metrics, MetricsServer
from outrider.runtime.security import Listening, inside
from outrider.runtime.settings import ServiceSettings
from outrider.runtime.stalls.gc_pauses import GcPauses
from outrider.runtime.stalls.watchdog import Watchdog
from outrider.runtime.tracing import Tracing, open_tracing
from outrider.wire.bind_errors import bind_failure
from outrider.wire.channel import server_options
from outrider.wire.incoming.unparsed import unparsed
from outrider.wire.status import error_object, guarded
from speculative.errors import OutriderError

log = logging.getLogger(__name__)

READY = "readiness"
"""Name of the health service that says whether the process is ready."""

Settings = TypeVar("Settings", bound=ServiceSettings)


class Service(Protocol):
    """A service that `serve` runs on one event loop; methods are called in the order below."""

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds the service's servicers to the server; returns their full names."""

    async def start(self) -> None:
        """Loads models and files off the event loop, while calls arrive. Raises OutriderError to give up."""

    async def stop(self, grace: float) -> None:
        """Ends all work, open streams included, within `grace` seconds. Also called when `start` failed."""


@dataclass(frozen=True, slots=True)
class ServiceContext(Generic[Settings]):
    """Settings, address and helpers of the process, from which a service is built."""

    settings: Settings
    address: str
    """host:port at which this process serves gRPC."""
    metrics: Metrics
    fail: Callable[[BaseException], None]
    """Ends the process with this error; may be called from any thread, and returns at once."""
    also: dict[str, str] = field(default_factory=dict)
    """Further fronts of the service, name to URL; the process announces them beside its address."""
    loaded: Callable[[int, int], None] = lambda done, of: None
    """Tells the parent process how many tensors of the model are loaded, and of how many; any thread."""
    tracing: Tracing = field(default_factory=Tracing)


Build = Callable[[ServiceContext[Settings]], Awaitable[Service]]
Announce = Callable[[dict[str, Any]], None]
Listen = Callable[[Settings], Listening]


class _Ending:
    """The request to stop, set by a signal or by a service that failed, and the error of that failure."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.requested = asyncio.Event()
        self.error: BaseException | None = None

    def on_signals(self) -> None:
        """Takes SIGTERM and SIGINT until the loop closes: one that comes late must not end the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.requested.set)

    def fail(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self.requested.set()


class _Health(health_aio.HealthServicer):  # type: ignore[misc]  # no types in the library
    """gRPC's own health service, within the bounds of small messages."""

    Check = guarded(health_aio.HealthServicer.Check)
    Watch = guarded(health_aio.HealthServicer.Watch)


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # no types in the library
    """gRPC's own reflection service, within the same bounds."""

    ServerReflectionInfo = guarded(reflection.aio.ReflectionServicer.ServerReflectionInfo)


async def serve(
    role: str,
    build: Build[Settings],
    settings: Settings,
    announce: Announce,
    listen: Listen[Settings] = inside,
) -> int:
    """Serves until a signal arrives; returns the exit status: 0, or 1 after a failure, which it announces.

    Later signals are without effect until the event loop closes.
    """
    ending = _Ending()
    ending.on_signals()
    try:
        await _serve(role, build, settings, announce, ending, listen(settings))
    except OutriderError as error:
        ending.error = error
    except Exception as error:
        log.exception("%s failed", role)
        ending.error = error
    if ending.error is None:
        return 0
    failure = _failure(ending.error)
    log.error("%s gave up: %s", role, failure["error"]["message"])
    announce(failure)
    return 1


async def _serve(
    role: str,
    build: Build[Settings],
    settings: Settings,
    announce: Announce,
    ending: _Ending,
    listening: Listening,
) -> None:
    options = [*server_options(settings.max_message_mb), *listening.options]
    server = grpc.aio.server(interceptors=listening.interceptors, options=options)
    address = _bind(role, server, settings.bind, listening.credentials)
    metrics = Metrics(role)
    tracing = open_tracing(role, settings.trace_endpoint, settings.trace_sample)
    context = ServiceContext(
        settings, address, metrics, ending.fail, tracing=tracing, loaded=_loaded(settings, announce)
    )
    service = await build(context)
    health = _Health()
    names = (READY, *service.register(server))
    health_pb2_grpc.add_HealthServicer_to_server(health, unparsed(server))
    described = _Reflection((*names[1:], "grpc.health.v1.Health", reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, unparsed(server))
    ready = False
    await _set(health, names, ready)
    await server.start()
    watchdog, gc_pauses = Watchdog(metrics), GcPauses()
    http = _metrics_server(role, metrics, settings.metrics_bind, lambda: ready, watchdog)
    try:
        log.info("bound", extra={"fields": {"address": address, "settings": settings.model_dump()}})
        if await _unless(ending.requested, service.start()):
            gc_pauses.start()
            watchdog.start()  # loading may hold the loop, and no request waits then
            ready = True
            await _set(health, names, ready)
            metrics_address = f"{_host(settings.metrics_bind)}:{http.port}"
            ready_line = {"role": role, "pid": os.getpid(), "address": address, "metrics": metrics_address}
            announce(ready_line | context.also)
            log.info("ready")
            await ending.requested.wait()
    finally:
        ready = False
        gc_pauses.stop()
        log.info("stopping")
        await health.enter_graceful_shutdown()
        await _stop(service, server, settings.grace_s)
        watchdog.stop()
        http.close()
        await asyncio.to_thread(tracing.close)


def _loaded(settings: ServiceSettings, announce: Announce) -> Callable[[int, int], None]:
    """A callback that reports loaded tensors to the parent process; without a parent it does nothing."""

    def loaded(done: int, of: int) -> None:
        if settings.parent_pid is not None:
            announce({"loaded": done, "of": of})

    return loaded


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` to its end and returns True; cancels it and returns False once the event is set."""
    task = asyncio.ensure_future(work)
    other = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        task.cancel()
        other.cancel()
        await asyncio.gather(task, other, return_exceptions=True)


async def _stop(service: Service, server: grpc.aio.Server, grace: float) -> None:
    """Stops the service first, so that its open streams end in order; then the server and its calls."""
    try:
        async with asyncio.timeout(grace + 2):
            await service.stop(grace)
    except Exception:
        log.exception("the service did not stop")
    await server.stop(grace)


async def _set(health: health_aio.HealthServicer, names: tuple[str, ...], ready: bool) -> None:
    status = health_pb2.HealthCheckResponse
    for name in names:
        await health.set(name, status.SERVING if ready else status.NOT_SERVING)


def _host(bind: str) -> str:
    return bind.rpartition(":")[0]


def _bind(role: str, server: grpc.aio.Server, bind: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        if credentials is None:
            port = server.add_insecure_port(bind)
        else:
            port = server.add_secure_port(bind, credentials)
    except RuntimeError as error:
        raise bind_failure("gRPC", bind, role, "bind", error) from error
    return f"{_host(bind)}:{port}"


def _metrics_server(
    role: str, metrics: Metrics, bind: str, ready: Callable[[], bool], watchdog: Watchdog
) -> MetricsServer:
    host, _, port = bind.rpartition(":")
    reports = {"/stalls": watchdog.recent}
    try:
        return MetricsServer(metrics, host.strip("[]"), int(port), ready, reports)
    except OSError as error:
        raise bind_failure("metrics", bind, role, "metrics_bind", error) from error


def _failure(error: BaseException) -> dict[str, Any]:
    """The error as an object to announce: with its text, as the parent may read what a client may not."""
    if isinstance(error, OutriderError):
        return error_object(error)
    return {"error": {"code": "INTERNAL", "message": f"{type(error).__name__}: {error}"}}


def run(role: str, build: Build[Settings], settings: Settings, listen: Listen[Settings] = inside) -> NoReturn:
    """Serves, then ends the process; for a `__main__`. `listen` makes the server's TLS and interceptors.

    The process ends without waiting for threads, in which a model may still load or a step may still run.
    """
    if settings.parent_pid is not None:
        die_with_parent(settings.parent_pid)
    _allow_open_files()
    announce = _claim_stdout()
    configure(role, settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(serve(role, build, settings, announce, listen))
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


def _allow_open_files() -> None:
    """Lets this process open as many files as the system grants: connections and mappings take one each.

    Most processes start with a limit of 1,024, above which only `select` fails, which no service uses.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _claim_stdout() -> Announce:
    """Keeps standard output for announcements; anything else that is printed goes to standard error.

    A process that was started without standard output announces nothing.
    """
    try:
        kept: int | None = os.dup(1)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        kept = None
    os.dup2(2, 1)
    out = os.fdopen(os.open(os.devnull, os.O_WRONLY) if kept is None else kept, "w", encoding="utf-8")

    def announce(line: dict[str, Any]) -> None:
        try:
            print(json.dumps(line), file=out, flush=True)
        except BrokenPipeError:
            log.warning("nobody reads standard output")

    return announce


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the event loops of services: uvloop's where it is installed; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
