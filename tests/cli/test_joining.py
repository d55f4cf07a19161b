"""`up` waits until its orchestrator reaches all workers, whatever credentials clients need."""

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import Gauge

from outrider.cli.local.stack import wait_until_joined
from outrider.runtime.metrics import Metrics, MetricsServer
from speculative.errors import Unavailable


@pytest.fixture
def served() -> Iterator[tuple[Gauge, str]]:
    """The orchestrator's gauge of workers in reach, and host:port of its metrics."""
    metrics = Metrics("orchestrator")
    up = Gauge("outrider_orchestrator_peer_up", "", ("peer",), registry=metrics.registry)
    server = MetricsServer(metrics, "127.0.0.1", 0, lambda: True)
    yield up, f"127.0.0.1:{server.port}"
    server.close()


def test_up_waits_for_the_last_worker(served: tuple[Gauge, str]) -> None:
    up, metrics = served
    up.labels("v:1").set(1)
    up.labels("d:1").set(0)
    late = threading.Timer(0.2, up.labels("d:1").set, (1,))
    late.start()
    wait_until_joined(metrics, ["v:1", "d:1"], 10.0)
    assert late.finished.is_set()


def test_workers_out_of_reach_are_named(served: tuple[Gauge, str]) -> None:
    up, metrics = served
    up.labels("v:1").set(1)
    up.labels("d:1").set(0)
    with pytest.raises(Unavailable, match="did not reach d:1, r:1 within"):
        wait_until_joined(metrics, ["v:1", "d:1", "r:1"], 0.1)


def test_without_metrics_no_worker_counts_as_reached() -> None:
    with pytest.raises(Unavailable, match="did not reach v:1 within"):
        wait_until_joined("127.0.0.1:1", ["v:1"], 0.1)
