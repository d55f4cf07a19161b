"""What the orchestrator counts of its requests and of those it depends on.

What a client sees of its requests is counted here, under vLLM's names; what an engine does, by verifiers.
"""

import time
from collections.abc import Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.drafters import SourceLink
from orchestrator.fleet import Fleet
from orchestrator.ledger import Ledger
from orchestrator.verifiers import VerifierLink
from outrider.runtime.metrics import MODEL, PREFIX, REQUEST_SECONDS, Metrics

OWN = f"{PREFIX}orchestrator_"
STORE_SECONDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1.0)


class RequestMetrics:
    """The counters, by model; requests that are refused before they have one are errors by reason."""

    def __init__(self, metrics: Metrics) -> None:
        counter = partial(metrics.counter, common=True)
        histogram = partial(metrics.histogram, labels=(MODEL,), common=True)
        self.running = metrics.gauge("requests", "Requests that are being answered.")
        self.ended = counter(
            "request_success", "Requests that ended with a finish reason.", (MODEL, "finished_reason")
        )
        self.errors = metrics.counter(
            "request_errors", "Requests that ended in an error, by the error's name.", ("reason",)
        )
        self.prompt_tokens = counter("prompt_tokens", "Ids of prompts that were decoded.", (MODEL,))
        self.generation_tokens = counter("generation_tokens", "Ids given to clients.", (MODEL,))
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request to its first ids.", buckets=REQUEST_SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between messages, divided by the later one's ids; once per id."
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From a request to its end.", buckets=REQUEST_SECONDS
        )
        self.recoveries = metrics.histogram(
            "recovery_seconds",
            "From the loss of a request's verifier until another had opened it.",
            buckets=REQUEST_SECONDS,
        )


class RequestMeasure:
    """One request's counts; its model is known once it is admitted."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._model = ""
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}
        metrics.running.inc()

    def admitted(self, model: str, prompt: int) -> None:
        """The request is for this model, with a prompt of so many ids."""
        self._model = model
        self._metrics.prompt_tokens.labels(model).inc(prompt)

    def delivered(self, choice: int, count: int) -> None:
        """So many ids of a choice are on their way to the client."""
        now, metrics = time.perf_counter(), self._metrics
        metrics.generation_tokens.labels(self._model).inc(count)
        if not self._last:
            metrics.first_token.labels(self._model).observe(now - self._began)
        if (last := self._last.get(choice)) is not None:
            each = metrics.inter_token.labels(self._model)
            for _ in range(count):
                each.observe((now - last) / count)
        self._last[choice] = now

    def recovered(self, silent_s: float) -> None:
        """Another verifier has it, after so long."""
        self._metrics.recoveries.observe(silent_s)

    def end(self, outcome: str, *, failed: bool) -> float:
        """By its finish reason, or the error's name; returns how long it took, in seconds."""
        took = time.perf_counter() - self._began
        self._metrics.running.dec()
        if failed:
            self._metrics.errors.labels(outcome).inc()
        else:
            self._metrics.ended.labels(self._model, outcome).inc()
            self._metrics.whole.labels(self._model).observe(took)
        return took


class StoreMetrics:
    """What the store costs and whether it works."""

    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics.registry
        self.seconds = metrics.histogram(
            "store_seconds", "In store code on a token's way, per message.", buckets=STORE_SECONDS
        )

    def watch(self, ledger: Ledger) -> None:
        """What it has to tell is read whenever it is asked for."""
        self._registry.register(_StoreCollector(ledger))


def watch_fleet(metrics: Metrics, fleet: Fleet) -> None:
    """Gauges that read the links, which come and go, whenever they are asked for."""
    metrics.registry.register(_FleetCollector(fleet))


class _Read(Collector):
    """What is read whenever it is asked for."""

    def describe(self) -> Iterator[Metric]:
        """Nothing is read at registration."""
        return iter(())


class _StoreCollector(_Read):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """From the thread that serves metrics."""
        ledger = self._ledger
        yield GaugeMetricFamily(
            f"{OWN}store_up", "Whether the store took the last batch.", value=float(ledger.well)
        )
        yield CounterMetricFamily(
            f"{OWN}store_failures", "Batches that the store did not take.", value=ledger.failures
        )
        yield GaugeMetricFamily(
            f"{OWN}store_sessions", "Sessions that the store is kept informed of.", value=ledger.waiting
        )


class _FleetCollector(_Read):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """From the thread that serves metrics, so from copies."""
        verifiers: dict[str, VerifierLink | SourceLink] = {**self._fleet.verifiers}
        peers = {**verifiers, **self._fleet.sources}
        answer = [address for address, link in verifiers.items() if link.reachable]
        yield GaugeMetricFamily(f"{OWN}verifiers_up", "Verifiers that answer.", value=len(answer))
        up = GaugeMetricFamily(f"{OWN}peer_up", "Whether a verifier or source answers.", labels=("peer",))
        sessions = GaugeMetricFamily(
            f"{OWN}peer_sessions", "Sessions that this process has there.", labels=("peer",)
        )
        broken = CounterMetricFamily(f"{OWN}peer_watch_broken", "Watch streams that broke.", labels=("peer",))
        for address, link in peers.items():
            up.add_metric((address,), float(link.reachable))
            sessions.add_metric((address,), link.sessions)
            if isinstance(link, VerifierLink):
                broken.add_metric((address,), link.broken)
        yield from (up, sessions, broken)
