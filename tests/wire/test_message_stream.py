"""The messages of streams get a tenth of the event loop's time, and the peers wait meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.v1 import common_pb2
from outrider.wire.incoming import message_stream
from outrider.wire.incoming.message_stream import (
    ALL_BARE_SHARE,
    ALL_BURST_S,
    ALL_SHARE,
    BARE_SHARE,
    BURST_S,
    BYTE_S,
    FIRST_S,
    LEAST_S,
    MESSAGE_S,
    SHARE,
    CommonSavings,
    MessageStream,
    Newcomers,
    Pace,
)
from outrider.wire.incoming.unparsed import Unparsed


@pytest.fixture(autouse=True)
def untouched_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accounts of a process in which no stream has sent anything yet."""
    monkeypatch.setattr(message_stream, "NEWCOMERS", Newcomers())
    monkeypatch.setattr(message_stream, "COMMON", CommonSavings())


def test_what_was_saved_up_is_spent_without_a_wait() -> None:
    pace = Pace(now=5.0, saved_s=BURST_S)
    assert pace.charge(BURST_S, now=5.0) == 0.0
    assert pace.charge(0.010, now=5.0) == pytest.approx(0.010 / SHARE)


def test_a_stream_saves_no_more_than_a_burst_however_long_it_is_silent() -> None:
    pace = Pace(now=0.0, saved_s=BURST_S)
    assert pace.charge(2 * BURST_S, now=1e6) == pytest.approx(BURST_S / SHARE)


@pytest.mark.parametrize("cost_s", [0.0001, 0.003, 0.2])
def test_a_stream_that_never_stops_gets_its_share_of_the_time(cost_s: float) -> None:
    pace, now, spent = Pace(now=0.0, saved_s=BURST_S), 0.0, 0.0
    while now < 1000.0:
        now += cost_s  # reading takes that long
        now += pace.charge(cost_s, now)
        spent += cost_s
    assert spent / now == pytest.approx(SHARE, rel=0.02)


def test_streams_that_never_stop_share_what_one_may_take() -> None:
    spent = 0.0
    for _ in range(4):
        pace, now = Pace(now=0.0, saved_s=BURST_S), 0.0
        while now < 1000.0:
            now += 0.003
            now += pace.charge(0.003, now, others=3)
            spent += 0.003
    assert 0.9 * SHARE < spent / 1000.0 < 1.3 * SHARE


def test_streams_that_are_opened_one_after_another_spend_little_more_than_one() -> None:
    newcomers, spent = Newcomers(), 0.0
    for opened in range(10_000):
        spent += newcomers.take(0.001 * opened)
    assert spent <= BURST_S + SHARE * 10.0 + LEAST_S * 10_000
    assert Newcomers().take(0.0) == FIRST_S


def test_a_first_small_message_never_waits_however_many_streams_others_open() -> None:
    newcomers = Newcomers()
    for _ in range(1000):
        newcomers.take(0.0)
    pace = Pace(now=0.0, saved_s=newcomers.take(0.0))
    assert pace.charge(MESSAGE_S + 2**15 * BYTE_S, now=0.0, others=1000) == 0.0


def busy_share(streams: int, each: float, seconds: float = 20.0, tick: float = 0.01) -> float:
    """The share of the time that streams spend which are all idle at first, and then send at this rate."""
    common = CommonSavings()
    paces = [Pace(now=0.0, saved_s=BURST_S, common=common) for _ in range(streams)]
    even_at, now, spent = [100.0] * streams, 100.0, 0.0
    while now < 100.0 + seconds:
        for number, pace in enumerate(paces):
            if even_at[number] <= now:
                overdrawn = sum(at > now for at in even_at)
                even_at[number] = now + pace.charge(each * tick, now, overdrawn)
                spent += each * tick
        now += tick
    return spent / seconds


def test_many_streams_that_stay_below_their_shares_do_not_take_the_loop_together() -> None:
    assert busy_share(50, each=0.09) < ALL_SHARE + SHARE + ALL_BARE_SHARE + 0.02
    assert busy_share(100, each=0.09) < ALL_SHARE + SHARE + ALL_BARE_SHARE + 0.02
    assert busy_share(1, each=0.09) == pytest.approx(0.09, rel=0.02)


def test_a_stream_has_its_full_bare_share_again_when_the_others_have_been_silent() -> None:
    common, streams = CommonSavings(), [object() for _ in range(100)]
    for stream in streams:
        crowded = common.bare_share(stream, now=10.0)
    assert crowded == pytest.approx(ALL_BARE_SHARE / 100)
    assert common.bare_share(streams[0], now=11.0) == pytest.approx(ALL_BARE_SHARE / 100)
    assert common.bare_share(streams[0], now=12.0) == BARE_SHARE


def test_a_burst_of_many_idle_streams_is_no_longer_than_the_common_savings() -> None:
    common = CommonSavings()
    paces = [Pace(now=0.0, saved_s=BURST_S, common=common) for _ in range(100)]
    unwaited = sum(BURST_S for pace in paces if pace.charge(BURST_S, now=100.0) < 0.01)
    assert unwaited <= ALL_BURST_S


def test_a_stream_of_few_messages_never_waits_for_peers_that_spend_everything() -> None:
    common = CommonSavings()
    mad = [Pace(now=0.0, saved_s=BURST_S, common=common) for _ in range(100)]
    quiet, waits = Pace(now=0.0, saved_s=BURST_S, common=common), []
    for tick in range(1, 400):
        for pace in mad:
            pace.charge(0.1, now=0.25 * tick)
        waits.append(quiet.charge(2 * MESSAGE_S, now=0.25 * tick))
    assert max(waits) == 0.0


async def test_streams_of_one_peer_wait_for_one_another() -> None:
    async def taken(request: Unparsed[Any]) -> Unparsed[Any]:
        return request

    large = bytes(8 * 2**20)
    cost_s = MESSAGE_S + len(large) * BYTE_S
    senders = [Sender(large) for _ in range(4)]

    async def read(sender: Sender) -> None:
        async for _ in MessageStream(sender, lambda: "peer", taken):
            await asyncio.sleep(0)

    began = time.monotonic()
    reading = [asyncio.create_task(read(sender)) for sender in senders]
    await asyncio.sleep(2.0)
    passed = time.monotonic() - began
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    asked = sum(sender.asked for sender in senders)
    # The first waits of each are short, since few others waited then.
    assert asked <= 4 * (FIRST_S / cost_s + 2) + 1.5 * SHARE * passed / cost_s


def test_a_stream_below_its_share_never_waits() -> None:
    pace = Pace(now=0.0, saved_s=BURST_S)
    assert not any(pace.charge(0.9 * SHARE * 0.01, now=0.01 * tick) for tick in range(1, 10_000))


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

    large = bytes(2**18)
    cost_s = MESSAGE_S + len(large) * BYTE_S
    sender = Sender(large)
    stream, began = MessageStream(sender, lambda: "peer", taken), time.monotonic()
    async with asyncio.timeout(60):
        while time.monotonic() - began < 0.5:
            assert (await anext(stream)).peer == "peer"
    passed = time.monotonic() - began
    assert 1 < sender.asked <= (FIRST_S + SHARE * passed) / cost_s + 1
