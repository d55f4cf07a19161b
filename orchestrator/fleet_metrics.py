"""What metrics say of workers, beside whether they answer: which are not used and why, end, or registered."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.fleet.fleet import Fleet
from outrider.runtime.metrics import Metrics

PREFIX = "outrider_orchestrator_peer_"


def watch_peers(metrics: Metrics, fleet: Fleet) -> None:
    """Gauges that read the fleet whenever they are asked for."""
    metrics.registry.register(_PeerCollector(fleet))


class _PeerCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterator[Metric]:
        """Nothing is read at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """From the thread that serves metrics, so from copies."""
        fleet = self._fleet
        addresses = [*fleet.verifiers.copy(), *fleet.sources.copy()]
        refused = GaugeMetricFamily(
            f"{PREFIX}refused", "Workers that are not used, 1 each, by why.", labels=("peer", "reason")
        )
        for address, refusal in dict(fleet.refused).items():
            refused.add_metric((address, refusal.kind), 1.0)
        draining = GaugeMetricFamily(
            f"{PREFIX}draining", "Whether a worker is about to end.", labels=("peer",)
        )
        registered = GaugeMetricFamily(
            f"{PREFIX}registered", "Whether a worker has registered, or was given.", labels=("peer",)
        )
        for address in addresses:
            draining.add_metric((address,), float(fleet.draining(address)))
            registered.add_metric((address,), float(fleet.is_registered(address)))
        yield from (refused, draining, registered)
