"""A stall of the event loop is measured, put down to what ran then, and logged at bounded intervals."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.runtime.children import ServiceProcess
from outrider.runtime.metrics import Metrics
from outrider.runtime.stalls.record import (
    KEPT,
    LOG_EVERY_S,
    MOST_PLACES,
    UNKNOWN,
    Seen,
    Stall,
    StallRecord,
    most_seen,
)
from outrider.runtime.stalls.watchdog import Watchdog
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.channel import open_sync_channel
from outrider.wire.origin import Origin, arrived
from tests.in_time import in_time
from tests.integration.live import sample, until

HELD_S = 0.4


def stall(seconds: float, where: str = "a.f") -> Stall:
    return Stall(ended=0.0, seconds=seconds, processor_seconds=seconds, seen=Seen(where))


def compute(seconds: float) -> None:
    """Computes for so much processor time in Python code."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        sum(range(1000))


def parse(seconds: float) -> None:
    """Computes for so much processor time in C code, which no other thread interrupts."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        re.match(r"(a*)*b", "a" * 22)


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[tuple[Watchdog, Metrics]]:
    metrics = Metrics("drafter")
    watchdog = Watchdog(metrics)
    watchdog.start()
    await asyncio.sleep(0.05)
    try:
        yield watchdog, metrics
    finally:
        watchdog.stop()


async def stalls_of(hold: Callable[[float], None]) -> list[dict[str, Any]]:
    """The stalls that are told of once a task for the request r-7 has held the loop."""

    async def answer() -> None:
        arrived(Origin("r-7"))
        hold(HELD_S)

    async with watched() as (watchdog, _), asyncio.timeout(60):
        await asyncio.create_task(answer())
        while not (told := of_request(watchdog)):  # noqa: ASYNC110  # what a thread sees
            await asyncio.sleep(0.02)
    return told


def of_request(watchdog: Watchdog) -> list[dict[str, Any]]:
    """The longer stalls of the request r-7; a busy machine has others."""
    told: list[dict[str, Any]] = json.loads(watchdog.recent())
    return [each for each in told if each["request"] == "r-7" and each["seconds"] > HELD_S / 2]


@pytest.mark.parametrize("hold", [compute, parse])
async def test_a_stall_names_what_ran_and_for_which_request(hold: Callable[[float], None]) -> None:
    (told,) = await stalls_of(hold)
    assert told["seconds"] >= HELD_S - 0.05
    assert told["processor_seconds"] >= HELD_S - 0.05
    assert told["where"].endswith(f"test_watchdog.{hold.__name__}")
    assert told["request"] == "r-7"
    assert any("stalls_of.<locals>.answer" in function for function in told["stack"])


async def test_a_loop_that_waits_for_something_else_uses_no_processor_time() -> None:
    (told,) = await stalls_of(time.sleep)
    assert told["seconds"] >= HELD_S - 0.05
    assert told["processor_seconds"] < 0.2


async def test_a_stall_is_counted_and_the_longest_is_shown_by_place() -> None:
    async with watched() as (_, metrics):
        sample_of = metrics.registry.get_sample_value
        of_place = {"where": f"{__name__}.compute"}
        async with asyncio.timeout(60):
            compute(0.15)
            await asyncio.sleep(0.15)
            compute(0.3)
            while (sample_of("outrider_loop_stall_seconds_count") or 0.0) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while (sample_of("outrider_loop_longest_stall_seconds", of_place) or 0.0) < 0.25:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_a_loop_that_is_only_busy_does_not_stall() -> None:
    async with watched() as (watchdog, _):
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            compute(0.001)
            await asyncio.sleep(0)
    long = [each for each in json.loads(watchdog.recent()) if each["where"].endswith("compute")]
    assert not [each for each in long if each["processor_seconds"] > 0.1]


async def test_a_stall_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with watched():
            compute(0.3)
            await asyncio.sleep(0.15)
            compute(0.3)
            await asyncio.sleep(0.15)
            in_time(len(caplog.records) == 1)
    in_time(len(caplog.records) == 2, caplog.records)
    first, last = caplog.records
    fields = vars(first)["fields"]
    in_time(fields["where"].endswith("compute"), fields)
    assert fields["stall_ms"] >= 250
    assert "stood still" in first.getMessage()
    assert "stood still" in last.getMessage()  # the second one, once no line will come any more


async def test_a_watchdog_that_never_started_can_be_stopped() -> None:
    Watchdog(Metrics("drafter")).stop()


def test_the_log_gets_the_longest_of_an_interval() -> None:
    record = StallRecord()
    record.add(stall(0.15))
    assert record.to_log(100.0) == (stall(0.15), 0)
    for seconds in (0.2, 0.9, 0.3, 0.05):
        record.add(stall(seconds))
    assert record.to_log(100.0 + LOG_EVERY_S - 0.1) is None
    assert record.to_log(100.0 + LOG_EVERY_S) == (stall(0.9), 2)
    assert record.to_log(1000.0) is None


def test_a_short_stall_is_not_logged() -> None:
    record = StallRecord()
    record.add(stall(0.05))
    assert record.to_log(0.0) is None
    assert record.recent == (stall(0.05),)


def test_places_and_kept_stalls_are_bounded() -> None:
    record = StallRecord()
    places = {record.add(stall(number / 1000, f"a.f{number}"))[0] for number in range(1, 200)}
    assert len(places) == MOST_PLACES + 1
    assert UNKNOWN in places
    assert len(record.recent) == KEPT
    assert record.add(stall(0.001, "a.f5")) == ("a.f5", 0.005)


def test_the_place_seen_most_often_is_named_even_where_its_lines_differ() -> None:
    at_lines = [Seen("a.loop", (f"a.loop:{line}",)) for line in range(3)]
    seen = Counter([*at_lines, Seen("a.other", ("a.other:1",)), Seen("a.other", ("a.other:1",))])
    assert most_seen(seen).where == "a.loop"
    assert most_seen(Counter()) == Seen()


def test_a_service_tells_of_its_stalls(start_toy: Callable[..., ServiceProcess], tmp_path: Path) -> None:
    toy = start_toy()
    with open_sync_channel(toy.address) as channel:
        request = generation_pb2.CancelRequest(session="stall")
        stub = generation_pb2_grpc.GenerationStub(channel)
        stub.Cancel(request, timeout=100, metadata=(("x-request-id", "mine"),))
    until(lambda: sample(toy.metrics, "outrider_loop_longest_stall_seconds", where="__main__.hold_the_loop"))
    log = tmp_path / "toy.log"
    until(lambda: "the event loop stood still" in log.read_text())
    (line,) = (line for line in log.read_text().splitlines() if "hold_the_loop" in line)
    assert "request=mine" in line
    assert toy.stop(60) == 0
