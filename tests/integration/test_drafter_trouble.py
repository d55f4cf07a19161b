"""The drafter dies, stalls and comes back: the same request goes on, with the ids of plain decoding."""

import os
import signal
from typing import Any

import pytest

from outrider.client import Client
from tests.integration.live import Up, stopped, until

LONG: dict[str, Any] = {
    "ids": [5, 9, 30],
    "max_tokens": 250,
    "seed": 8,
    "temperature": 0.9,
    "logit_bias": {1: -100.0},
}
OFFERED = "outrider_verifier_source_nodes_total"


def drafts(up: Up, client: Client) -> bool:
    """Whether the drafter offers anything during a request; these two models are too quick for more."""
    before = up.metric("verifier", OFFERED, source="drafter", outcome="offered")
    client.generate(**LONG)
    return up.metric("verifier", OFFERED, source="drafter", outcome="offered") > before


@pytest.mark.slow
def test_a_request_outlives_its_drafter(up: Up, client: Client) -> None:
    plain = client.generate(**LONG, speculation=False)
    first = up.children()["drafter"]
    stream = client.stream(**LONG)
    next(stream)
    os.kill(first, signal.SIGKILL)
    assert stream.completion().ids == plain.ids
    assert client.generate(**LONG).ids == plain.ids, "with no drafter at all"
    until(lambda: up.children().get("drafter", first) != first)
    until(lambda: drafts(up, client))
    assert client.generate(**LONG).ids == plain.ids
    assert up.metric("drafter", "outrider_drafter_sessions") >= 0, "its metrics are where they were"
    assert "requests go on" in up.log()


def test_a_request_outlives_a_drafter_that_stalls_and_goes_on(up: Up, client: Client) -> None:
    plain = client.generate(**LONG, speculation=False)
    until(lambda: drafts(up, client))
    drafter = up.children()["drafter"]
    stream = client.stream(**LONG)
    next(stream)
    with stopped(drafter):
        during = client.generate(**LONG)
    assert during.ids == plain.ids
    assert stream.completion().ids == plain.ids
    until(lambda: drafts(up, client))
