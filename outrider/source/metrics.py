"""A worker's counts and gauges as Prometheus sees them: read on demand, so that counting costs nothing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.source.followed import FollowedSession
from outrider.source.worker import SourceWorker

COUNTERS = {
    "nodes_drafted": "Nodes drafted: sent to verifiers, or dropped on the way out.",
    "refusals": "Sessions that the source refused to follow, or stopped following.",
    "unknown_aliases": "Messages under an alias that is not followed.",
    "failed_sessions": "Sessions refused because the source failed on them.",
}
"""Help texts of every source's counters, by field of `WorkerCounts`."""
GAUGES = {"sessions": "Sessions that the source follows now."}


class SourceCollector(Collector):
    """Exports a worker's counts and gauges; zeros until the source is loaded.

    Args:
        prefix: what the metrics' names begin with.
        worker: the worker; None until the source is loaded.
        counters: help texts of the source's own counts, by field.
        gauges: help texts of its own gauges, by name.
    """

    def __init__(
        self,
        prefix: str,
        worker: Callable[[], SourceWorker[FollowedSession] | None],
        counters: Mapping[str, str],
        gauges: Mapping[str, str],
    ) -> None:
        self._prefix = prefix
        self._worker = worker
        self._counters = {**COUNTERS, **counters}
        self._gauges = {**GAUGES, **gauges}

    def describe(self) -> Iterator[Metric]:
        """No metrics: the worker is not asked at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The worker's counters and gauges as metrics."""
        worker = self._worker()
        counts = {} if worker is None else asdict(worker.counts)
        held = {} if worker is None else worker.gauges()
        for name, what in self._counters.items():
            yield CounterMetricFamily(self._prefix + name, what, value=counts.get(name, 0))
        for name, what in self._gauges.items():
            yield GaugeMetricFamily(self._prefix + name, what, value=held.get(name, 0))
