"""The metrics of one process, and a small HTTP server that serves them and answers probes.

Names are outrider_<role>_<name>. A metric that other model servers have too carries vLLM's name behind
outrider_ and has vLLM's meaning. Label sets are bounded: never session ids. This module knows nothing of what
the metrics count.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

import outrider
from outrider.wire.incoming.malformed import MALFORMED

PREFIX = "outrider_"
# Rounds take milliseconds on a CPU and less on a GPU: finer at the lower end than the library's own.
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0)


# Requests take from tens of milliseconds to minutes.
REQUEST_SECONDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.8,
    1.5,
    3.0,
    6.0,
    12.0,
    25.0,
    50.0,
    100.0,
    200.0,
    400.0,
)
# From the shortest stall that is seen to stalls that end a service.
STALL_SECONDS = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
MODEL = "model_name"
"""Label with the target's name; on every metric that has vLLM's name."""


class Metrics:
    """Makes a role's metrics in one registry; `common` metrics get vLLM's name, others the role's prefix."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        info = Gauge(f"{PREFIX}info", "What this process is; 1.", ("role", "version"), registry=self.registry)
        info.labels(role, outrider.__version__).set(1)
        self.loop_stalls = self.histogram(
            "loop_stall_seconds", "Stalls of the event loop.", buckets=STALL_SECONDS, common=True
        )
        self.longest_loop_stall = self.gauge(
            "loop_longest_stall_seconds", "Longest stall while a function ran.", ("where",), common=True
        )
        self.registry.register(_MalformedCollector())

    def _name(self, name: str, common: bool) -> str:
        return f"{PREFIX}{name}" if common else f"{PREFIX}{self.role}_{name}"

    def counter(self, name: str, what: str, labels: Sequence[str] = (), *, common: bool = False) -> Counter:
        return Counter(self._name(name, common), what, labels, registry=self.registry)

    def gauge(self, name: str, what: str, labels: Sequence[str] = (), *, common: bool = False) -> Gauge:
        return Gauge(self._name(name, common), what, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        what: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS,
        *,
        common: bool = False,
    ) -> Histogram:
        return Histogram(self._name(name, common), what, labels, buckets=buckets, registry=self.registry)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _MalformedCollector(Collector):
    """Exports this process's count of malformed messages, by method."""

    def collect(self) -> Iterator[Metric]:
        """The counter, with a sample for HTTP and for each method that had a malformed message."""
        family = CounterMetricFamily(
            "outrider_malformed_messages",
            "Requests and responses that are neither a protobuf message nor HTTP.",
            labels=("method",),
        )
        for method, count in MALFORMED.counts.copy().items():
            family.add_metric((method,), count)
        yield family


NO_REPORTS: Mapping[str, Callable[[], bytes]] = {}


class MetricsServer:
    """Serves /metrics, /healthz (process lives), /readyz (503 until ready) and reports, in daemon threads."""

    def __init__(
        self,
        metrics: Metrics,
        host: str,
        port: int,
        ready: Callable[[], bool],
        reports: Mapping[str, Callable[[], bytes]] = NO_REPORTS,
    ) -> None:
        """Binds the port (0 picks a free port) and starts to serve. Raises OSError where binding fails.

        `reports` makes further pages, in JSON, by path.
        """
        self._server = _Server((host, port), _handler(metrics, ready, reports))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Binds; `::` takes IPv4 as well, as gRPC's does."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores peers that hang up or do not speak HTTP."""


def _handler(
    metrics: Metrics, ready: Callable[[], bool], reports: Mapping[str, Callable[[], bytes]]
) -> type[BaseHTTPRequestHandler]:
    paths = ", ".join(("/metrics", "/healthz", "/readyz", *reports))

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, metrics.exposition())
            elif path == "/healthz":
                self._answer(200, "text/plain", b"ok\n")
            elif path == "/readyz":
                self._answer(
                    *((200, "text/plain", b"ok\n") if ready() else (503, "text/plain", b"not ready\n"))
                )
            elif path in reports:
                self._answer(200, "application/json", reports[path]())
            else:
                self._answer(404, "text/plain", f"there are: {paths}\n".encode())

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: probes arrive every second."""

    return Handler
