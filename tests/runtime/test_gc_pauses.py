"""Long pauses of the garbage collector: what has outlived a collection is not looked at again."""

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from outrider.runtime.stalls import gc_pauses
from outrider.runtime.stalls.gc_pauses import (
    IDLE,
    LOOK_S,
    THAW_BUSY_S,
    THAW_S,
    YOUNG,
    GcPauses,
    ThawSchedule,
)


class Node:
    """An object that can refer to itself."""

    me: "Node"


@pytest.fixture
def pauses() -> Iterator[GcPauses]:
    """The exemptions of this process, which end with the test."""
    made = GcPauses()
    yield made
    made.stop()
    gc.unfreeze()


def collect() -> tuple[int, weakref.ref[Node]]:
    """Collects garbage; returns how many objects became exempt, and a cycle that is garbage since."""
    node = Node()
    node.me = node
    before = gc.get_freeze_count()
    kept = [[at] for at in range(1000)]
    gc.collect()
    exempted = gc.get_freeze_count() - before
    assert kept
    return exempted, weakref.ref(node)


async def test_survivors_of_a_long_collection_are_exempt_until_the_process_is_idle(
    monkeypatch: pytest.MonkeyPatch, pauses: GcPauses
) -> None:
    monkeypatch.setattr(gc_pauses, "LONG_S", 0.0)
    monkeypatch.setattr(gc_pauses, "LOOK_S", 0.05)
    pauses.start()
    exempted, garbage = collect()
    assert exempted >= 900  # exempt objects may have been freed
    gc.collect()
    assert garbage() is not None, "an exempt cycle was collected"
    monkeypatch.setattr(gc_pauses, "IDLE", 1000.0)  # whatever threads other tests have left
    monkeypatch.setattr(gc_pauses, "THAW_S", 0.0)
    collected = asyncio.Event()
    weakref.finalize(garbage(), collected.set)
    async with asyncio.timeout(20):
        await collected.wait()


async def test_a_short_collection_exempts_nothing(monkeypatch: pytest.MonkeyPatch, pauses: GcPauses) -> None:
    monkeypatch.setattr(gc_pauses, "LONG_S", 1000.0)
    pauses.start()
    exempted, garbage = collect()
    assert exempted <= 0  # exempt objects may have been freed
    gc.collect()
    assert garbage() is None


async def test_nothing_is_exempted_once_the_process_stops(
    monkeypatch: pytest.MonkeyPatch, pauses: GcPauses
) -> None:
    monkeypatch.setattr(gc_pauses, "LONG_S", 0.0)
    callbacks = list(gc.callbacks)
    pauses.stop()
    pauses.start()
    pauses.stop()
    assert gc.callbacks == callbacks
    exempted, _ = collect()
    assert exempted <= 0


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="left alone there")
async def test_young_objects_are_collected_less_often_while_any_service_of_the_process_serves(
    pauses: GcPauses,
) -> None:
    before, other = gc.get_threshold(), GcPauses()
    pauses.start()
    assert gc.get_threshold()[0] == YOUNG > before[0]
    other.start()
    pauses.stop()
    assert gc.get_threshold()[0] == YOUNG
    other.stop()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("own", [0, 2 * YOUNG])
async def test_no_collections_and_a_higher_threshold_of_the_owner_stay(pauses: GcPauses, own: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(own, *before[1:])
        pauses.start()
        assert gc.get_threshold()[0] == own
    finally:
        pauses.stop()
        gc.set_threshold(*before)


def test_exemptions_end_in_an_idle_moment_once_an_hour() -> None:
    schedule = ThawSchedule(0.0, 0.0, 0.0)
    assert not schedule.is_due(THAW_S - LOOK_S, 0.0)
    assert schedule.is_due(THAW_S, 0.0)
    busy_s = 2 * IDLE * LOOK_S
    assert not schedule.is_due(THAW_S + LOOK_S, busy_s)
    assert schedule.is_due(THAW_S + 2 * LOOK_S, busy_s)


def test_a_process_that_is_never_idle_collects_everything_once_a_day() -> None:
    schedule = ThawSchedule(0.0, 0.0, 0.0)
    steps = int(THAW_BUSY_S / LOOK_S)
    due = [step for step in range(1, steps + 1) if schedule.is_due(step * LOOK_S, step * LOOK_S)]
    assert due == [steps]
