"""Clocks that are set while requests run: epochs go on rising, deadlines and silences are not touched."""

import random
import time
from typing import Any

import pytest

from orchestrator.relay.epochs import Epochs
from outrider.client import AsyncClient
from outrider.wire.epochs import DAY_MS, checked_epoch
from tests.orchestrator.conftest import MAX_LENGTH, World, next_id

HOUR_S = 3600


class WallClock:
    """Time of day as epochs read it, off by what a test sets; gRPC's own deadlines read the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off_s = 0
        real_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + self.off_s * 10**9)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S, -2 * 24 * HOUR_S, 2 * 24 * HOUR_S])
async def test_a_stream_does_not_notice_that_the_clock_is_set(
    world: World, wall: WallClock, step_s: int
) -> None:
    verifier = await world.verifier(tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]), sources=1)
    async with front.client.stream(ids=[5], max_tokens=MAX_LENGTH - 1, timeout=100) as stream:
        await anext(stream)
        wall.off_s = step_s
        answer = await stream.completion()
    assert answer.ids == tuple(next_id(position) for position in range(1, MAX_LENGTH))
    assert len(verifier.opened) == 1, "nobody was taken for dead"
    assert answer.finish_reason.value == "length", "the deadline is not the clock's"


@pytest.mark.parametrize("step_s", [-1, -HOUR_S, -2 * 24 * HOUR_S])
async def test_a_session_goes_on_after_the_clock_was_set_back(
    world: World, wall: WallClock, step_s: int
) -> None:
    """Through the orchestrator that knows it, and through one that was started after."""
    wall.off_s = HOUR_S
    verifier = await world.verifier()
    first = await world.ready(await world.front([verifier.address]))
    asks: dict[str, Any] = {"ids": [5], "max_tokens": 4, "session": "mine", "seed": 1}
    before = await first.client.generate(**asks)
    wall.off_s += step_s
    if abs(step_s) < 24 * HOUR_S:
        assert (await first.client.generate(**asks)).ids == before.ids
        second = await world.ready(await world.front([verifier.address]))
        assert (await second.client.generate(**asks)).ids == before.ids
        epochs = [message.epoch for message in verifier.opened]
        assert epochs == sorted(epochs)
    verifier.highest = 0  # of another session nobody has seen any epoch
    other = await first.client.generate(**(asks | {"session": "other"}))
    assert other.ids == before.ids
    checked_epoch(verifier.opened[-1].epoch, time.time_ns() // 10**6)


async def test_a_takeover_goes_above_the_epoch_of_a_clock_that_was_ahead(
    world: World, wall: WallClock
) -> None:
    wall.off_s = HOUR_S
    doomed, other = await world.verifier(tick_s=0.02), await world.verifier(tick_s=0.02)
    front = await world.ready(await world.front([doomed.address, other.address]))
    async with front.client.stream(ids=[5], max_tokens=MAX_LENGTH - 1) as stream:
        await anext(stream)
        wall.off_s = 0
        running = doomed if doomed.opened else other
        await running.server.stop(0)
        answer = await stream.completion()
    assert answer.ids == tuple(next_id(position) for position in range(1, MAX_LENGTH))
    taken = other if running is doomed else doomed
    assert taken.opened[-1].epoch > running.opened[-1].epoch


def test_epochs_begin_again_where_no_verifier_would_take_another(caplog: pytest.LogCaptureFixture) -> None:
    now = [10 * DAY_MS]
    epochs = Epochs(lambda: now[0], random.Random(0).getrandbits)
    epochs.next()
    now[0] -= 2 * DAY_MS
    assert checked_epoch(epochs.next(), now[0]) >> 20 == now[0] + 1
    assert "set back by 2.0 days" in caplog.text


async def test_the_client_s_patience_is_not_the_clock_s(world: World, wall: WallClock) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    async with AsyncClient(f"127.0.0.1:1,{front.address}", patience_s=60.0) as client:
        stream = client.stream(ids=[5], max_tokens=4)
        wall.off_s = -HOUR_S
        assert len((await stream.completion()).ids) == 4
