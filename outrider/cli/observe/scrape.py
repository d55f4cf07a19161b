"""Reads the metrics of one process of this machine over HTTP."""

import time
from http.client import HTTPConnection, HTTPException

from outrider.cli.observe.gauges import Reading, read

READ_S = 10.0
"""Timeout of a reading, in seconds."""


def reading_of(address: str) -> Reading:
    """The metrics now of the process whose /metrics are at host:port; empty where they cannot be read."""
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host.strip("[]"), int(port), timeout=READ_S)
    try:
        connection.request("GET", "/metrics")
        return read(connection.getresponse().read().decode(), time.monotonic())
    except (OSError, HTTPException, ValueError):
        return Reading(time.monotonic())
    finally:
        connection.close()
