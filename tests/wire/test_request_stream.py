"""One stream's requests get a quarter of the event loop's time, and the peer waits meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.v1 import common_pb2
from outrider.wire.incoming.request_stream import BURST_S, BYTE_S, MESSAGE_S, SHARE, Pace, RequestStream
from outrider.wire.incoming.unparsed import Unparsed


def test_what_was_saved_up_is_spent_without_a_wait() -> None:
    pace = Pace(now=5.0)
    assert pace.charge(BURST_S, now=5.0) == 0.0
    assert pace.charge(0.010, now=5.0) == pytest.approx(0.010 / SHARE)


def test_a_stream_saves_no_more_than_a_burst_however_long_it_is_silent() -> None:
    pace = Pace(now=0.0)
    assert pace.charge(2 * BURST_S, now=1e6) == pytest.approx(BURST_S / SHARE)


@pytest.mark.parametrize("cost_s", [0.0001, 0.003, 0.2])
def test_a_stream_that_never_stops_gets_its_share_of_the_time(cost_s: float) -> None:
    pace, now, spent = Pace(now=0.0), 0.0, 0.0
    while now < 1000.0:
        now += cost_s  # reading takes that long
        now += pace.charge(cost_s, now)
        spent += cost_s
    assert spent / now == pytest.approx(SHARE, rel=0.02)


def test_a_stream_below_its_share_never_waits() -> None:
    pace = Pace(now=0.0)
    assert not any(pace.charge(0.2 * 0.01, now=0.01 * tick) for tick in range(1, 10_000))


class Sender:
    """A peer that has the next message ready whenever it is asked; counts how often that was."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked = 0

    async def __aiter__(self) -> AsyncIterator[Unparsed[Any]]:
        while True:
            self.asked += 1
            yield Unparsed(self.data, common_pb2.SessionKey, "outrider.v1.Test/Stream")


async def test_a_peer_is_not_read_while_its_stream_is_overdrawn() -> None:
    async def taken(request: Unparsed[Any]) -> Unparsed[Any]:
        return request

    large = bytes(8 * 2**20)
    cost_s = MESSAGE_S + len(large) * BYTE_S
    sender = Sender(large)
    stream, began = RequestStream(sender, lambda: "peer", taken), time.monotonic()
    async with asyncio.timeout(60):
        while time.monotonic() - began < 1.0:
            assert (await anext(stream)).peer == "peer"
    passed = time.monotonic() - began
    assert sender.asked <= (BURST_S + SHARE * passed) / cost_s + 1
    assert sender.asked >= BURST_S / cost_s, "the burst came without a wait"
