"""The orchestrator's metrics: of its requests, of the workers that it depends on, and of its store.

What a client sees of its requests is counted here, under vLLM's names; verifiers count what their engines do.
"""

import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.edge.account import Dropped
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.source_probe import SourceProbe
from orchestrator.fleet.target_model import TargetModel
from orchestrator.fleet.verifier_link import VerifierLink
from orchestrator.relay.delivery import Delivered, Event, Finished, Recovered
from orchestrator.store.ledger import Ledger
from orchestrator.trace import RequestTrace
from outrider.runtime.metrics import MODEL, PREFIX, REQUEST_SECONDS, Metrics
from outrider.runtime.tracing import Tracing
from speculative.errors import OutriderError
from speculative.stop import FinishReason

OWN = f"{PREFIX}orchestrator_"
STORE_SECONDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1.0)


ACCEPTANCE_LENGTHS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0)
"""Bounds of the histogram's buckets: 1 is plain decoding, 17 the most of a round with 16 nodes."""


class RequestMetrics:
    """Counters and histograms of requests, by model; `begin` measures and traces one request."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._tracing = tracing or Tracing()
        counter = partial(metrics.counter, common=True)
        histogram = partial(metrics.histogram, labels=(MODEL,), common=True)
        self.running = metrics.gauge("requests", "Requests in progress.")
        self.ended = counter(
            "request_success", "Requests that ended with a finish reason.", (MODEL, "finished_reason")
        )
        self.errors = metrics.counter(
            "request_errors", "Requests that ended in an error, by the error's name.", ("reason",)
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens that were decoded.", (MODEL,))
        self.generation_tokens = counter("generation_tokens", "Tokens given to clients.", (MODEL,))
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from a request to its first tokens.", buckets=REQUEST_SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between messages, per token of the later message; observed once per token.",
        )
        self.whole = histogram(
            "e2e_request_latency_seconds",
            "Time from a request's beginning to its end.",
            buckets=REQUEST_SECONDS,
        )
        self.acceptance_length = metrics.histogram(
            "acceptance_length",
            "Tokens for each round of the target, of each choice that ended.",
            labels=(MODEL,),
            buckets=ACCEPTANCE_LENGTHS,
        )
        self.recoveries = metrics.histogram(
            "recovery_seconds",
            "Time from the loss of a request's verifier until another one has opened the request.",
            buckets=REQUEST_SECONDS,
        )

    def begin(self) -> "RequestMeasure":
        """Begin to measure the request that this task is bound to; see `outrider.wire.origin`."""
        return RequestMeasure(self, RequestTrace(self._tracing))


class RequestMeasure:
    """Measures one request from its first message to its end, as a context manager.

    A request that leaves the context without an end or an error was cancelled.
    """

    def __init__(self, metrics: RequestMetrics, trace: RequestTrace) -> None:
        self._metrics = metrics
        self._trace = trace
        self._outcome = FinishReason.CANCELLED.value
        self._unfinished = 1
        """Choices that have not ended: a request of which some have ended has not ended."""
        self._model = ""
        self._tokens = 0
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._metrics.running.inc()
        self._trace.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = isinstance(error, Exception)
        metrics, took = self._metrics, time.perf_counter() - self._began
        metrics.running.dec()
        if failed:
            self._outcome = type(error).__name__ if isinstance(error, OutriderError) else "internal"
            metrics.errors.labels(self._outcome).inc()
        else:
            metrics.ended.labels(self._model, self._outcome).inc()
            metrics.whole.labels(self._model).observe(took)
        self._trace.end(self._outcome, self._tokens, took, failed=failed)

    def admitted(self, request: AdmittedRequest, target: TargetModel) -> None:
        """The request passed every check."""
        self._model = target.name
        self._unfinished = request.choices - len(request.ended)
        self._metrics.prompt_tokens.labels(target.name).inc(len(request.ids))
        self._trace.admitted(request, target)

    def note(self, event: Event) -> None:
        """An event of the request is on its way to the client."""
        self._trace.note(event)
        if isinstance(event, Delivered):
            self._delivered(event.choice, len(event.delta.ids))
        elif isinstance(event, Recovered):
            self._metrics.recoveries.observe(event.silent_s)
        elif isinstance(event, Finished):
            self._unfinished -= 1
            if not self._unfinished:
                self._outcome = event.reason.value
            if event.usage.rounds:
                length = event.usage.completion_tokens / event.usage.rounds
                self._metrics.acceptance_length.labels(self._model).observe(length)

    def _delivered(self, choice: int, count: int) -> None:
        now, metrics = time.perf_counter(), self._metrics
        self._tokens += count
        metrics.generation_tokens.labels(self._model).inc(count)
        if not self._last:
            metrics.first_token.labels(self._model).observe(now - self._began)
        if (last := self._last.get(choice)) is not None:
            each = metrics.inter_token.labels(self._model)
            for _ in range(count):
                each.observe((now - last) / count)
        self._last[choice] = now


class BodyMetrics:
    """Metrics of the processes that read large HTTP bodies."""

    def __init__(self, metrics: Metrics) -> None:
        self.waiting = metrics.gauge("bodies_waiting", "Large HTTP bodies that wait for a process.")
        self.seconds = metrics.histogram(
            "body_seconds",
            "Time from a large HTTP body's arrival until a process has read it, or it was refused.",
            buckets=REQUEST_SECONDS,
        )
        self.ended = metrics.counter("body_processes_ended", "Processes that read bodies and were replaced.")


class EdgeMetrics:
    """Metrics of clients' devices and their drafts, up to the verifiers."""

    def __init__(self, metrics: Metrics) -> None:
        self.sessions = metrics.gauge("edge_sessions", "Sessions whose client's device drafts.")
        self.followed = metrics.gauge(
            "edge_sessions_followed", "Sessions with a device whose verifier fetches the drafts."
        )
        self.unread = metrics.counter(
            "edge_nodes_unread", "Devices' nodes dropped because a verifier did not read them."
        )
        self._forwarded = metrics.counter("edge_nodes_forwarded", "Devices' nodes sent on to verifiers.")
        self._dropped = metrics.counter(
            "edge_nodes_dropped", "Devices' nodes that did not go on to a verifier, by reason.", ("reason",)
        )

    def drop(self, why: Dropped, count: int) -> None:
        """Count nodes that did not go on."""
        self._dropped.labels(why.value).inc(count)

    def forward(self, count: int) -> None:
        """Count nodes that went on."""
        self._forwarded.inc(count)


class StoreMetrics:
    """Metrics of the store: its cost on the way of tokens, and whether it works."""

    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics.registry
        self.seconds = metrics.histogram(
            "store_seconds",
            "Time in store code while a message's tokens are delivered.",
            buckets=STORE_SECONDS,
        )
        self.quota_seconds = metrics.histogram(
            "quota_seconds",
            "Time that a request waits for the store to count it against its key's quota.",
        )

    def watch(self, ledger: Ledger) -> None:
        """Read the ledger's state whenever metrics are collected."""
        self._registry.register(_StoreCollector(ledger))


def watch_fleet(metrics: Metrics, fleet: Fleet) -> None:
    """Read the state of all workers, which come and go, whenever metrics are collected."""
    metrics.registry.register(_FleetCollector(fleet))
    metrics.registry.register(_PeerCollector(fleet))


class _Read(Collector):
    """A collector that reads state whenever metrics are collected."""

    def describe(self) -> Iterator[Metric]:
        """No metric: nothing is read at registration."""
        return iter(())


class _StoreCollector(_Read):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """The store's metrics. Runs in the thread that serves metrics."""
        ledger = self._ledger
        yield GaugeMetricFamily(
            f"{OWN}store_up", "Whether the store took the last batch.", value=float(ledger.well)
        )
        yield CounterMetricFamily(
            f"{OWN}store_failures", "Batches that the store did not take.", value=ledger.failures
        )
        yield GaugeMetricFamily(
            f"{OWN}store_sessions",
            "Sessions whose records are kept up to date in the store.",
            value=ledger.waiting,
        )


class _FleetCollector(_Read):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Metrics of links to workers. Runs in the thread that serves metrics, so it reads copies."""
        verifiers: dict[str, VerifierLink | SourceProbe] = {**self._fleet.verifiers}
        peers = {**verifiers, **self._fleet.sources}
        answer = [address for address, link in verifiers.items() if link.reachable]
        yield GaugeMetricFamily(f"{OWN}verifiers_up", "Verifiers that answer.", value=len(answer))
        up = GaugeMetricFamily(f"{OWN}peer_up", "Whether a verifier or source answers.", labels=("peer",))
        sessions = GaugeMetricFamily(
            f"{OWN}peer_sessions", "Sessions of this orchestrator at the worker.", labels=("peer",)
        )
        broken = CounterMetricFamily(
            f"{OWN}peer_watch_broken", "Watch streams to a verifier that broke.", labels=("peer",)
        )
        for address, link in peers.items():
            up.add_metric((address,), float(link.reachable))
            sessions.add_metric((address,), link.sessions)
            if isinstance(link, VerifierLink):
                broken.add_metric((address,), link.broken)
        yield from (up, sessions, broken)


class _PeerCollector(_Read):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """Metrics of which workers are used. Runs in the thread that serves metrics, so it reads copies."""
        fleet = self._fleet
        addresses = [*fleet.verifiers.copy(), *fleet.sources.copy()]
        refused = GaugeMetricFamily(
            f"{OWN}peer_refused", "1 for each worker that is not used, by reason.", labels=("peer", "reason")
        )
        for address, refusal in dict(fleet.refused).items():
            refused.add_metric((address, refusal.kind), 1.0)
        draining = GaugeMetricFamily(
            f"{OWN}peer_draining", "Whether a worker is about to end.", labels=("peer",)
        )
        registered = GaugeMetricFamily(
            f"{OWN}peer_registered",
            "1 if a worker has registered, 0 if only the settings name it.",
            labels=("peer",),
        )
        for address in addresses:
            draining.add_metric((address,), float(fleet.draining(address)))
            registered.add_metric((address,), float(fleet.is_registered(address)))
        yield from (refused, draining, registered)
