"""What every store promises, on every store: the Redis one on a real server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.store import (
    STALE,
    STORES,
    Append,
    Handle,
    SessionRecord,
    SessionStore,
    Tokens,
    WorkerReport,
    open_store,
)
from orchestrator.store.memory import MemoryStore
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import RANDOM_BITS, wall_clock_ms
from outrider.wire.workers import BELIEVED_S, WorkerEntry, WorkerState

KEY = SessionKey("tenant", "a session {with} braces", 0)
NOW = wall_clock_ms() << RANDOM_BITS
OLD, NEW = NOW + 1, NOW + 2


@pytest.fixture(params=sorted(STORES))
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SessionStore]:
    where = [request.getfixturevalue("redis_server").url] if request.param == "redis" else []
    opened = open_store(request.param, *where)
    yield opened
    await opened.close()


async def test_a_record_is_found_as_it_was_put(store: SessionStore) -> None:
    record = SessionRecord(KEY, OLD, "a:1", choices=3)
    assert await store.find(KEY) is None
    assert await store.put([(record, OLD)]) == [True]
    assert await store.find(KEY) == record
    assert await store.find(KEY._replace(tenant="other")) is None


async def test_of_two_records_the_higher_epoch_stands(store: SessionStore) -> None:
    assert await store.put([(SessionRecord(KEY, NEW, "a:1"), NEW)]) == [True]
    assert await store.put([(SessionRecord(KEY, OLD, "b:1"), OLD)]) == [False]
    assert await store.find(KEY) == SessionRecord(KEY, NEW, "a:1")


async def test_a_record_is_forgotten_by_its_own_epoch_alone(store: SessionStore) -> None:
    await store.put([(SessionRecord(KEY, NEW, "a:1"), NEW)])
    await store.forget(KEY, OLD)
    assert await store.find(KEY) is not None
    await store.forget(KEY, NEW)
    await store.forget(KEY, NEW)
    assert await store.find(KEY) is None


async def test_a_cancel_is_recorded_where_there_is_a_record(store: SessionStore) -> None:
    assert await store.cancel(KEY) is None
    assert await store.find(KEY) is None
    await store.put([(SessionRecord(KEY, OLD, "a:1"), OLD)])
    assert await store.cancel(KEY) == SessionRecord(KEY, OLD, "a:1"), "as it was before"
    assert await store.cancel(KEY) == SessionRecord(KEY, OLD, "a:1", cancelled=True)
    assert await store.find(KEY) == SessionRecord(KEY, OLD, "a:1", cancelled=True)


async def test_a_cancel_outlives_takeovers_repeats_and_the_end(store: SessionStore) -> None:
    await store.put([(SessionRecord(KEY, OLD, "a:1"), OLD)])
    await store.cancel(KEY)
    await store.put([(SessionRecord(KEY, OLD, "a:1"), OLD)])
    await store.put([(SessionRecord(KEY, NEW, "b:1"), 0)])
    await store.forget(KEY, NEW)
    assert await store.find(KEY) == SessionRecord(KEY, NEW, "b:1", cancelled=True)


async def test_a_new_request_lifts_a_cancel(store: SessionStore) -> None:
    await store.put([(SessionRecord(KEY, OLD, "a:1"), OLD)])
    await store.cancel(KEY)
    await store.put([(SessionRecord(KEY, NEW, "b:1"), NEW)])
    assert await store.find(KEY) == SessionRecord(KEY, NEW, "b:1")


async def test_a_new_request_that_is_placed_again_keeps_its_own_cancel(store: SessionStore) -> None:
    """The Cancel came between the two; one of an earlier request is lifted even then."""
    for cancelled_at, stays in ((OLD, False), (NEW, True)):
        await store.put([(SessionRecord(KEY, cancelled_at, "a:1"), cancelled_at)])
        await store.cancel(KEY)
        again = SessionRecord(KEY, NEW + 1, "b:1")
        assert await store.put([(again, NEW)]) == [True]
        assert await store.find(KEY) == again._replace(cancelled=stays)
        await store.put([(again._replace(epoch=NEW + 2), NEW + 2)])
        await store.forget(KEY, NEW + 2)


@pytest.mark.parametrize(
    ("before", "then", "stays"), [(1, 2, False), (1, 1, True), (0, 2, True), (1, 0, True)]
)
async def test_a_cancel_stands_for_its_own_request_alone(
    store: SessionStore, before: int, then: int, stays: bool
) -> None:
    """Even where the store missed that another was begun, and hears of it when it is moved; 0 may be any."""
    await store.put([(SessionRecord(KEY, OLD, "a:1", request=before), OLD)])
    await store.cancel(KEY)
    await store.put([(SessionRecord(KEY, NEW, "b:1", request=then), 0)])
    assert await store.find(KEY) == SessionRecord(KEY, NEW, "b:1", cancelled=stays, request=then)


async def test_a_record_that_is_put_as_cancelled_is(store: SessionStore) -> None:
    """As after a store that lost it has come back."""
    await store.put([(SessionRecord(KEY, OLD, "a:1", cancelled=True), 0)])
    assert await store.find(KEY) == SessionRecord(KEY, OLD, "a:1", cancelled=True)


async def test_ids_are_appended_once_and_in_order(store: SessionStore) -> None:
    assert await store.tokens(KEY) is None
    first, second = Append(KEY, OLD, 0, [5, 2**32 - 1]), Append(KEY, OLD, 2, [7])
    assert await store.append([first, second, first, second]) == [2, 3, 3, 3]
    assert await store.append([Append(KEY, OLD, 1, [2**32 - 1, 7, 8])]) == [4]
    assert await store.tokens(KEY) == Tokens(OLD, (5, 2**32 - 1, 7, 8))


async def test_ids_behind_a_gap_are_not_taken(store: SessionStore) -> None:
    assert await store.append([Append(KEY, OLD, 4, [9])]) == [0]
    assert await store.append([Append(KEY, OLD, 0, [1])]) == [1]
    assert await store.append([Append(KEY, OLD, 2, [9])]) == [1]
    assert await store.tokens(KEY) == Tokens(OLD, (1,))


async def test_a_later_epoch_begins_the_ids_anew(store: SessionStore) -> None:
    await store.append([Append(KEY, OLD, 0, [1, 2])])
    assert await store.append([Append(KEY, NEW, 2, [3])]) == [0]
    assert await store.append([Append(KEY, NEW, 0, [4, 5, 6])]) == [3]
    assert await store.append([Append(KEY, OLD, 2, [3])]) == [STALE]
    assert await store.tokens(KEY) == Tokens(NEW, (4, 5, 6))


async def test_choices_have_ids_of_their_own(store: SessionStore) -> None:
    other = KEY._replace(choice=1)
    assert await store.append([Append(KEY, OLD, 0, [1]), Append(other, OLD, 0, [2, 3])]) == [1, 2]
    assert await store.tokens(other) == Tokens(OLD, (2, 3))


async def test_of_two_handles_the_higher_epoch_stands(store: SessionStore) -> None:
    assert await store.handle(KEY) is None
    handle = Handle(KEY, NEW, "a:1", 100, 2**64 - 1)
    await store.put_handle(handle)
    await store.put_handle(handle._replace(epoch=OLD, verifier="b:1"))
    assert await store.handle(KEY) == handle


async def test_a_handle_and_a_record_of_a_session_are_apart(store: SessionStore) -> None:
    await store.put([(SessionRecord(KEY, NEW, "a:1"), NEW)])
    await store.put_handle(Handle(KEY, NEW, "b:1", 3, 4))
    await store.forget(KEY, NEW)
    assert await store.handle(KEY) == Handle(KEY, NEW, "b:1", 3, 4)


async def test_the_first_known_prefix_is_found_in_its_own_scope(store: SessionStore) -> None:
    assert await store.longest_prefix("model", []) is None
    await store.put_prefixes("model", [], "z:1")
    await store.put_prefixes("model", [10, 2**64 - 1], "a:1")
    await store.put_prefixes("model", [30], "b:1")
    assert await store.longest_prefix("model", [99, 2**64 - 1, 30]) == (1, "a:1")
    assert await store.longest_prefix("model", [30, 10]) == (0, "b:1")
    assert await store.longest_prefix("other", [30, 10]) is None


async def test_each_reporter_s_latest_word_on_a_worker_stands(store: SessionStore) -> None:
    assert await store.workers() == []
    report = WorkerReport("v:1", "one", "toy", "cpu float32", 8, 3, 0.025)
    other = report._replace(reporter="two", sessions=1)
    await store.report([report, other])
    await store.report([report._replace(sessions=4)])
    assert sorted(await store.workers()) == [report._replace(sessions=4), other]


async def test_a_worker_s_latest_announcement_stands(store: SessionStore) -> None:
    assert await store.announced() == []
    state = WorkerState("toy", "a1", "d" * 64, "cpu float32", 8, 3, 0.025)
    entry = WorkerEntry("verifier", "v:1", state)
    other = WorkerEntry("drafter", "d:1", WorkerState())
    await store.announce([entry, other])
    await store.announce([replace(entry, draining=True)])
    assert sorted(await store.announced(), key=str) == sorted([replace(entry, draining=True), other], key=str)


async def test_an_announcement_ends(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(store, MemoryStore):
        now = [0.0]
        store = MemoryStore(lambda: now[0])
    entries = [WorkerEntry("drafter", "d:1", WorkerState())]
    await store.announce(entries)
    assert len(await store.announced()) == 1
    if isinstance(store, MemoryStore):
        now[0] = BELIEVED_S
    else:
        monkeypatch.setattr("orchestrator.store.redis.BELIEVED_MS", 10)
        await store.announce(entries)
        await asyncio.sleep(0.05)
    assert await store.announced() == []


async def test_nothing_to_do_is_done_at_once(store: SessionStore) -> None:
    nothing: list[Any] = []
    await store.announce(nothing)
    assert await store.put(nothing) == []
    assert await store.append(nothing) == []
