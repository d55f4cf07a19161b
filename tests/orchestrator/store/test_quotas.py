"""Quotas counted in a shared store, by a real Redis server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orchestrator.store import redis as redis_store
from orchestrator.store.quotas import QuotaState, QuotaUse
from orchestrator.store.redis import RedisStore


@pytest.fixture
async def store(redis_server: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_server.url)
    yield store
    await store.close()


async def used(store: RedisStore, reporter: str, **how: Any) -> QuotaState:
    quota = {"streams": None, "requests_per_minute": None, "tokens_per_minute": None}
    report = {"key": "abc", "reporter": reporter, "running": 0, "tokens": 0, "beginning": 1, **quota, **how}
    (state,) = await store.use_quotas([QuotaUse(**report)])
    assert state is not None
    return state


async def test_requests_that_run_anywhere_count_until_their_end_is_reported(store: RedisStore) -> None:
    assert (await used(store, "one", streams=2)).refused == ""
    assert (await used(store, "two", streams=2)).elsewhere == 1
    assert (await used(store, "two", streams=2, running=1)).refused == "streams"
    assert (await used(store, "one", streams=2, running=1)).refused == "streams"
    assert (await used(store, "one", streams=2, running=0, beginning=0)).elsewhere == 1
    assert (await used(store, "two", streams=2, running=1)).refused == ""


async def test_orchestrators_share_the_requests_of_a_minute(store: RedisStore) -> None:
    refused = [
        (await used(store, reporter, requests_per_minute=6)).refused for reporter in ("one", "two") * 4
    ]
    assert refused == [""] * 6 + ["requests"] * 2
    assert (await used(store, "three", requests_per_minute=6, beginning=0)).requests_left < 1


async def test_tokens_may_be_overdrawn_and_hold_up_every_orchestrator(store: RedisStore) -> None:
    state = await used(store, "one", tokens_per_minute=60, tokens=90)
    assert (state.refused, round(state.tokens_left)) == ("tokens", -30)
    assert (await used(store, "two", tokens_per_minute=60)).refused == "tokens"
    assert (await used(store, "two", tokens_per_minute=6000, beginning=0)).tokens_left < 0


async def test_a_refused_request_takes_nothing(store: RedisStore) -> None:
    await used(store, "one", streams=1, requests_per_minute=100)
    for _ in range(5):
        assert (await used(store, "two", streams=1, requests_per_minute=100)).refused == "streams"
    assert (await used(store, "two", requests_per_minute=100, beginning=0)).requests_left >= 99


async def test_buckets_fill_by_the_servers_clock(store: RedisStore) -> None:
    assert (await used(store, "one", requests_per_minute=6000, beginning=50)).requests_left < 5951
    await asyncio.sleep(0.1)
    assert (await used(store, "two", requests_per_minute=6000, beginning=0)).requests_left > 5955


async def test_what_an_orchestrator_that_died_reported_to_run_expires(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await used(store, "dead", streams=1)
    assert (await used(store, "alive", streams=1)).refused == "streams"
    monkeypatch.setattr(redis_store, "STREAMS_MS", 10)
    await used(store, "dead", streams=1, running=1, beginning=0)
    await asyncio.sleep(0.05)
    assert (await used(store, "alive", streams=1)).refused == ""


async def test_keys_do_not_count_for_one_another(store: RedisStore) -> None:
    await used(store, "one", streams=1)
    assert (await used(store, "one", key="other", streams=1)).refused == ""


async def test_an_entry_of_another_version_is_left_alone(store: RedisStore, redis_server: Any) -> None:
    redis_server.say("HSET", "outrider:{abc}:quota", "version", "9")
    assert await store.use_quotas([QuotaUse("abc", "one", 1, None, None, 0, 0, 1)]) == [None]


@pytest.mark.parametrize("field", ["requests", "tokens", "at", "s:other"])
async def test_rubbish_in_an_entry_is_written_over(store: RedisStore, redis_server: Any, field: str) -> None:
    bounds = {"streams": 1, "requests_per_minute": 10, "tokens_per_minute": 10}
    redis_server.say("HSET", "outrider:{abc}:quota", "version", "1", field, "nonsense")
    state = await used(store, "one", **bounds)
    assert (state.refused, state.elsewhere, round(state.requests_left)) == ("", 0, 9)


async def test_orchestrators_are_counted_while_they_report(store: RedisStore) -> None:
    assert await store.count_orchestrators("one") == 1
    assert await store.count_orchestrators("two") == 2
    assert await store.count_orchestrators("one") == 2
