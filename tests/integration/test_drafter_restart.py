"""The embedded pair's own drafter is killed within a request and drafts for that same request again."""

import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from tests.in_time import in_time
from tests.integration.live import Up, start_up, stopped, until

LONG: dict[str, Any] = {
    "prompt": "def read(path):\n",
    "max_tokens": 1600,
    "seed": 3,
    "temperature": 0.8,
    "ignore_eos": True,
}
BEFORE = 400
"""More tokens than are committed before the drafter is killed."""


@pytest.mark.slow
def test_one_request_outlives_the_restart_of_its_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eager passes with a fixed budget: a drafter in another process is too slow for passes of a millisecond.
    monkeypatch.setenv("OUTRIDER_VERIFIER__BUDGET", "fixed")
    # The verifier is held for as long as a drafter takes to start.
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR__SILENT_S", "200")
    up = start_up("--passes", "eager", log=tmp_path / "stderr")
    try:
        up.wait_ready()
        with Client(up.address) as client:
            stream = client.stream(**LONG, sources=["drafter"])
            next(stream)
            first = up.children()["drafter"]
            with stopped(up.children()["verifier"]):
                os.kill(first, signal.SIGKILL)
                until(lambda: up.children().get("drafter", first) != first)
                until(lambda: is_ready(up, "drafter"))
            answer = stream.completion()
            assert answer.ids == client.generate(**LONG, speculation=False).ids
            later = answer.sources[BEFORE:]
            in_time("drafter" in later, "the new drafter takes the request up where it is")
    finally:
        assert up.stop() == 0, up.log()


def is_ready(up: Up, role: str) -> bool:
    """Whether the process of a role says that it is ready."""
    address = next(process["metrics"] for process in up.processes if process["role"] == role)
    try:
        with urllib.request.urlopen(f"http://{address}/readyz", timeout=100) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
