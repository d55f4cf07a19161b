"""Waits until an orchestrator has found its workers, as its metrics say.

Its front may want a key and certificates that whoever starts it does not have; its metrics want none.
"""

import time
from collections.abc import Collection
from http.client import HTTPConnection, HTTPException

from outrider.cli.gauges import read
from speculative.errors import Unavailable

CALL_S = 5.0
EVERY_S = 0.02


def wait_until_joined(metrics: str, workers: Collection[str], within_s: float) -> None:
    """Until all workers (host:port) answer the orchestrator whose /metrics are at host:port.

    Raises Unavailable, naming those that do not.
    """
    deadline = time.monotonic() + within_s
    while missing := set(workers) - _answering(metrics):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the orchestrator did not reach {', '.join(sorted(missing))} within {within_s:g} s: where "
                "these have certificates (tls_cert), it needs one of their authority; its log says more"
            )
        time.sleep(EVERY_S)


def _answering(metrics: str) -> set[str]:
    """None where the metrics cannot be read now."""
    host, _, port = metrics.rpartition(":")
    connection = HTTPConnection(host.strip("[]"), int(port), timeout=CALL_S)
    try:
        connection.request("GET", "/metrics")
        reading = read(connection.getresponse().read().decode(), time.monotonic())
        return {peer for peer, up in reading.by("orchestrator_peer_up", "peer").items() if up}
    except (OSError, HTTPException, ValueError):
        return set()
    finally:
        connection.close()
