"""A Cancel that another orchestrator sends to where a session was, while it moves, is heeded where it is."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from orchestrator.store import SessionRecord
from orchestrator.store.ledger import Ledger
from orchestrator.store.memory import MemoryStore
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import RANDOM_BITS, wall_clock_ms

KEY = SessionKey("", "mine")
OLD = wall_clock_ms() << RANDOM_BITS
NEW = OLD + 1


@pytest.fixture
async def ledger() -> AsyncIterator[Ledger]:
    store = MemoryStore()
    await store.put([(SessionRecord(KEY, OLD, "a:1"), OLD)])
    ledger = Ledger(store, lambda seconds: None)
    ledger.store = store  # type: ignore[attr-defined]  # for the test to cancel through
    ledger.start()
    yield ledger
    await ledger.stop()


@pytest.mark.parametrize("cancelled", [True, False])
async def test_it_is_asked_for_once_the_store_knows_the_new_place(ledger: Ledger, cancelled: bool) -> None:
    if cancelled:
        await ledger.store.cancel(KEY)  # type: ignore[attr-defined]
    ledger.opened(SessionRecord(KEY, NEW, "b:1"), 0, {0: []})
    asked = asyncio.create_task(ledger.was_cancelled_meanwhile(KEY, NEW))
    assert await asyncio.wait_for(asked, 60) is cancelled


async def test_a_session_that_ended_or_moved_on_is_no_longer_asked_for(ledger: Ledger) -> None:
    assert not await ledger.was_cancelled_meanwhile(KEY, NEW)
    ledger.opened(SessionRecord(KEY, NEW + 1, "b:1"), 0, {0: []})
    assert not await ledger.was_cancelled_meanwhile(KEY, NEW)
