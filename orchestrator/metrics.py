"""What the orchestrator counts of its requests and of those it depends on.

Names follow those that load generators and dashboards know from other servers, under outrider_orchestrator_.
"""

import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Self

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.drafters import SourceLink
from orchestrator.events import Delivered, Event, Finished, Recovered
from orchestrator.fleet import Fleet
from orchestrator.ledger import Ledger
from orchestrator.verifiers import VerifierLink
from outrider.runtime.metrics import Metrics
from speculative.commit import FinishReason
from speculative.errors import OutriderError

REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0)


STORE_SECONDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1, 1.0)


class RequestMetrics:
    """The counters; `begin` measures one request."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "requests", "Requests by how they ended: a finish reason or an error.", ("outcome",)
        )
        self.running = metrics.gauge("num_requests_running", "Requests that are being answered.")
        self.prompt_tokens = metrics.counter("prompt_tokens", "Ids of prompts that were decoded.")
        self.generation_tokens = metrics.counter("generation_tokens", "Ids given to clients.")
        self.first_token = metrics.histogram(
            "time_to_first_token_seconds", "From a request to its first ids.", buckets=REQUEST_SECONDS
        )
        self.inter_token = metrics.histogram(
            "inter_token_latency_seconds", "Between messages, divided by the later one's ids; once per id."
        )
        self.whole = metrics.histogram(
            "e2e_request_latency_seconds", "From a request to its end.", buckets=REQUEST_SECONDS
        )
        self.rounds = metrics.counter(
            "spec_decode_num_drafts", "Rounds: target passes that committed ids of finished requests."
        )
        self.drafted = metrics.counter(
            "spec_decode_num_draft_tokens", "Nodes offered to finished requests.", ("source",)
        )
        self.accepted = metrics.counter(
            "spec_decode_num_accepted_tokens", "Drafted ids delivered by finished requests.", ("source",)
        )

        self.recoveries = metrics.histogram(
            "recovery_seconds",
            "From the loss of a request's verifier until another had opened it.",
            buckets=REQUEST_SECONDS,
        )

    def begin(self) -> "RequestMeasure":
        return RequestMeasure(self)


class RequestMeasure:
    """One request from its first message to its end, as a context manager; unless told, it was cancelled."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._outcome = FinishReason.CANCELLED.value
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._metrics.running.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._outcome = type(error).__name__ if isinstance(error, OutriderError) else "internal"
        self._metrics.running.dec()
        self._metrics.requests.labels(self._outcome).inc()
        self._metrics.whole.observe(time.perf_counter() - self._began)

    def prompt(self, count: int) -> None:
        """The request is admitted with so many ids."""
        self._metrics.prompt_tokens.inc(count)

    def note(self, event: Event) -> None:
        """This is on its way to the client."""
        if isinstance(event, Delivered):
            self._delivered(event.choice, len(event.delta.ids))
        elif isinstance(event, Recovered):
            self._metrics.recoveries.observe(event.silent_s)
        elif isinstance(event, Finished):
            self._finished(event)

    def _delivered(self, choice: int, count: int) -> None:
        now = time.perf_counter()
        self._metrics.generation_tokens.inc(count)
        if not self._last:
            self._metrics.first_token.observe(now - self._began)
        if (last := self._last.get(choice)) is not None:
            for _ in range(count):
                self._metrics.inter_token.observe((now - last) / count)
        self._last[choice] = now

    def _finished(self, event: Finished) -> None:
        self._outcome = event.reason.value
        self._metrics.rounds.inc(event.usage.rounds)
        for source, count in event.usage.drafted_by_source.items():
            self._metrics.drafted.labels(source).inc(count)
        for source, count in event.usage.accepted_by_source.items():
            self._metrics.accepted.labels(source).inc(count)


class StoreMetrics:
    """What the store costs and whether it works."""

    def __init__(self, metrics: Metrics) -> None:
        self.seconds = metrics.histogram(
            "store_seconds", "In store code on a token's way, per message.", buckets=STORE_SECONDS
        )
        self._failures = metrics.gauge("store_failures", "Batches that the store did not take so far.")
        self._sessions = metrics.gauge("store_sessions", "Sessions that the store is kept informed of.")

    def watch(self, ledger: Ledger) -> None:
        """The gauges read it whenever they are asked for."""
        self._failures.set_function(partial(getattr, ledger, "failures"))
        self._sessions.set_function(partial(getattr, ledger, "waiting"))


def watch_fleet(metrics: Metrics, fleet: Fleet) -> None:
    """Gauges that read the links, which come and go, whenever they are asked for."""
    metrics.registry.register(_FleetCollector(fleet))


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterator[Metric]:
        """Nothing is read at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """From the thread that serves metrics, so from copies."""
        verifiers: dict[str, VerifierLink | SourceLink] = {**self._fleet.verifiers}
        peers = {**verifiers, **self._fleet.sources}
        gauges = {
            "up": ("Whether a verifier or source answers.", peers, "reachable"),
            "sessions": ("Sessions that this process has there.", peers, "sessions"),
            "watch_broken": ("Watch streams that broke since the start.", verifiers, "broken"),
        }
        for name, (what, links, attribute) in gauges.items():
            gauge = GaugeMetricFamily(f"outrider_orchestrator_peer_{name}", what, labels=("peer",))
            for address, link in links.items():
                gauge.add_metric((address,), float(getattr(link, attribute)))
            yield gauge
