"""Virtual time, and processes that freeze and die on it."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from benchmarks.simulation.clock import Process, VirtualLoop, virtual_time


def run(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def test_a_day_passes_at_once_and_in_order() -> None:
    loop, called = VirtualLoop(), []

    async def work() -> float:
        loop.call_later(86_400, called.append, "a day")
        loop.call_later(3_600, called.append, "an hour")
        began = loop.time()
        await asyncio.sleep(100_000)
        return loop.time() - began

    began = time.monotonic()
    assert run(loop, work()) == 100_000
    assert time.monotonic() - began < 100
    assert called == ["an hour", "a day"]


def test_waiting_for_what_never_comes_is_an_error() -> None:
    loop = VirtualLoop()

    async def work() -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        loop.run_until_complete(work())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()


def test_a_frozen_process_stands_still_while_its_clock_goes_on() -> None:
    loop = VirtualLoop()
    frozen, other = Process(loop, "frozen"), Process(loop, "other")
    ticks: dict[str, list[float]] = {"frozen": [], "other": []}

    async def tick(name: str) -> None:
        while True:
            await asyncio.sleep(1)
            ticks[name].append(loop.time() - 100)

    async def work() -> None:
        frozen.spawn(tick("frozen"))
        other.spawn(tick("other"))
        await asyncio.sleep(2.5)
        frozen.freeze()
        await asyncio.sleep(3)
        frozen.wake()
        await asyncio.sleep(1.25)
        frozen.kill()
        other.kill()
        await asyncio.sleep(0)

    run(loop, work())
    assert ticks["other"] == [1, 2, 3, 4, 5, 6]
    assert ticks["frozen"] == [1, 2, 5.5, 6.5]


def test_what_a_process_starts_dies_with_it() -> None:
    loop = VirtualLoop()
    process, ended = Process(loop, "one"), []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("child")

    async def parent() -> None:
        await asyncio.gather(asyncio.create_task(child()), child())

    async def work() -> None:
        process.spawn(parent())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(0.1)

    run(loop, work())
    assert ended == ["child", "child"]
    assert not process.tasks
    assert not loop.faults


def test_an_exception_that_nobody_takes_is_a_fault() -> None:
    loop = VirtualLoop()
    process = Process(loop, "one")

    async def fails() -> None:
        raise ValueError("what")

    async def work() -> None:
        process.spawn(fails())
        await asyncio.sleep(1)

    run(loop, work())
    assert loop.faults == ["one: ValueError('what')"]


def test_services_read_the_virtual_clock_and_nobody_else_does() -> None:
    import outrider.wire.epochs

    loop = VirtualLoop()
    with virtual_time(loop):
        before = outrider.wire.epochs.wall_clock_ms()
        loop.now += 60
        assert outrider.wire.epochs.wall_clock_ms() - before == 60_000
        assert time.time_ns() // 10**6 > before
    assert outrider.wire.epochs.time is time
    loop.close()
