"""Large messages are read in pieces, with pauses that leave half of the event loop to others."""

import asyncio

import pytest

from outrider.v1 import verifier_pb2
from outrider.wire.incoming.shape import FIELDS_PER_PAUSE, SMALL_BYTES, Bounds
from outrider.wire.incoming.unparsed import Pauses, Unparsed

WIDE = Bounds(most_bytes=2**24, most_fields=2**20)


def large_request() -> verifier_pb2.WatchRequest:
    request = verifier_pb2.WatchRequest()
    for alias in range(20_000):
        request.add.add(alias=alias, epoch=1)
    return request


def unparsed(request: verifier_pb2.WatchRequest) -> Unparsed[verifier_pb2.WatchRequest]:
    return Unparsed(request.SerializeToString(), verifier_pb2.WatchRequest, "Watch")


async def test_a_message_that_is_read_in_pieces_is_the_message() -> None:
    request = large_request()
    assert request.ByteSize() > SMALL_BYTES
    assert await unparsed(request).parse(WIDE) == request


async def test_other_tasks_run_half_of_the_time_while_messages_are_read() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await asyncio.gather(*(unparsed(large_request()).parse(WIDE) for _ in range(3)))
    counting.cancel()
    pieces = 3 * 3 * 20_000 // FIELDS_PER_PAUSE
    assert turns > 3 * pieces, "a loop that is always busy would run the task once for each piece"


@pytest.mark.parametrize("others", [0, 1, 3])
async def test_a_pause_is_longer_the_more_messages_are_read(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = iter([10.0, 10.002, 11.0])
    monkeypatch.setattr("outrider.wire.incoming.unparsed.asyncio.sleep", sleep)
    monkeypatch.setattr("outrider.wire.incoming.unparsed.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(Pauses, "at_once", others)
    with Pauses() as pauses:
        await pauses.pause()
    assert slept == [pytest.approx(0.002 * (2 * others + 1))]
    assert Pauses.at_once == others
