"""The embedded pair's own drafter is killed within a request and drafts for that same request again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from tests.in_time import in_time
from tests.integration.live import start_up

LONG: dict[str, Any] = {
    "prompt": "def read(path):\n",
    "max_tokens": 1600,
    "seed": 3,
    "temperature": 0.8,
    "ignore_eos": True,
}


@pytest.mark.slow
def test_one_request_outlives_the_restart_of_its_drafter(tmp_path: Path) -> None:
    up = start_up(log=tmp_path / "stderr")
    try:
        up.wait_ready()
        with Client(up.address) as client:
            stream = client.stream(**LONG, sources=["drafter"])
            attributed = [source for source in next(stream).sources if source]
            first = up.children()["drafter"]
            os.kill(first, signal.SIGKILL)
            for chunk in stream:
                restarted = up.children().get("drafter", first) != first
                attributed += [source for source in chunk.sources if source and restarted]
            plain = client.generate(**LONG, speculation=False)
            assert stream.completion().ids == plain.ids
            in_time("drafter" in attributed, "the new drafter takes the request up where it is")
    finally:
        assert up.stop() == 0, up.log()
