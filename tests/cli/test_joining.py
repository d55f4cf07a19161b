"""How `up` finds out that its orchestrator has found the others, whatever clients have to show."""

import threading
from collections.abc import Iterator

import pytest
from prometheus_client import Gauge

from outrider.cli.local.stack import wait_until_joined
from outrider.runtime.metrics import Metrics, MetricsServer
from speculative.errors import Unavailable


@pytest.fixture
def served() -> Iterator[tuple[Gauge, str]]:
    """Who answers the orchestrator, as its metrics tell it, and where these are."""
    metrics = Metrics("orchestrator")
    up = Gauge("outrider_orchestrator_peer_up", "", ("peer",), registry=metrics.registry)
    server = MetricsServer(metrics, "127.0.0.1", 0, lambda: True)
    yield up, f"127.0.0.1:{server.port}"
    server.close()


def test_it_waits_for_the_last_of_them(served: tuple[Gauge, str]) -> None:
    up, metrics = served
    up.labels("v:1").set(1)
    up.labels("d:1").set(0)
    late = threading.Timer(0.2, up.labels("d:1").set, (1,))
    late.start()
    wait_until_joined(metrics, ["v:1", "d:1"], 10.0)
    assert late.finished.is_set()


def test_who_was_not_found_is_named(served: tuple[Gauge, str]) -> None:
    up, metrics = served
    up.labels("v:1").set(1)
    up.labels("d:1").set(0)
    with pytest.raises(Unavailable, match="did not reach d:1, r:1 within"):
        wait_until_joined(metrics, ["v:1", "d:1", "r:1"], 0.1)


def test_metrics_that_are_not_there_find_nobody() -> None:
    with pytest.raises(Unavailable, match="did not reach v:1 within"):
        wait_until_joined("127.0.0.1:1", ["v:1"], 0.1)
