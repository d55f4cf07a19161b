"""Quotas over several orchestrators with one Redis server, which may freeze or end."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front import cluster_quotas
from orchestrator.front.cluster_quotas import ASK_S, ClusterQuotas
from orchestrator.front.quota import Allowance, Quota
from orchestrator.store import redis as redis_store
from orchestrator.store.quotas import QuotaState, QuotaUse
from orchestrator.store.redis import RedisStore
from outrider.client import AsyncClient
from speculative.errors import QuotaExceeded
from tests.in_time import in_time
from tests.orchestrator.conftest import World
from tests.orchestrator.fronts import soon, write_keys
from tests.orchestrator.store.conftest import own_redis as own_redis
from tests.orchestrator.store.conftest import redis_server as redis_server
from tests.orchestrator.store.conftest import shared_redis as shared_redis

KEY = "0123456789ab"


class Counting:
    """One orchestrator's quotas of one key."""

    def __init__(self, url: str, quota: Quota) -> None:
        self.store = RedisStore(url)
        self.quota = quota
        self.waited: list[float] = []
        self.cluster = ClusterQuotas(self.store, self.waited.append)
        self.allowance = Allowance(quota, time.monotonic())

    def running(self) -> Any:
        return self.cluster.running(KEY, self.quota, self.allowance)

    async def passes(self) -> bool:
        """Whether a short request is let in."""
        try:
            async with self.running():
                return True
        except QuotaExceeded:
            return False


@asynccontextmanager
async def counting(url: str, quota: Quota, orchestrators: int = 2) -> AsyncIterator[list[Counting]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(orchestrators):
            one = Counting(url, quota)
            stack.push_async_callback(one.store.close)
            one.cluster.start()
            stack.push_async_callback(one.cluster.stop)
            found.append(one)
        yield found


async def test_requests_at_once_are_counted_over_orchestrators(redis_server: Any, patient: None) -> None:
    async with counting(redis_server.url, Quota(streams=2)) as (one, other):
        async with one.running(), other.running():
            assert not await one.passes()
            assert not await other.passes()
        assert await other.passes(), "one that has just ended elsewhere stands in nobody's way"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the store as long as a busy machine takes."""
    monkeypatch.setattr(cluster_quotas, "ASK_S", 30.0)


async def test_a_burst_everywhere_begins_as_many_requests_as_the_quota_has(
    redis_server: Any, patient: None
) -> None:
    async with counting(redis_server.url, Quota(requests_per_minute=10), 3) as orchestrators:
        passed = await asyncio.gather(*(one.passes() for one in orchestrators * 8))
    assert sum(passed) == 10


async def test_tokens_spent_at_one_orchestrator_hold_up_the_other(redis_server: Any, patient: None) -> None:
    async with counting(redis_server.url, Quota(tokens_per_minute=100)) as (one, other):
        async with one.running():
            one.cluster.spent(KEY, 150)
        await soon(lambda: forgotten(one))  # it has reported what was spent
        with pytest.raises(QuotaExceeded, match="tokens of the minute are used up") as refused:
            async with other.running():
                pass
        assert 25 < refused.value.retry_after_s < 35


async def test_a_refusal_elsewhere_is_known_here_before_a_request_is_parsed(
    redis_server: Any, patient: None
) -> None:
    async with counting(redis_server.url, Quota(requests_per_minute=2)) as (one, other):
        assert [await one.passes(), await one.passes(), await other.passes()] == [True, True, False]
        with pytest.raises(QuotaExceeded, match="requests of the minute"):
            other.allowance.begin(1, time.monotonic())


async def test_an_allowance_that_was_made_anew_learns_what_the_store_counts(
    redis_server: Any, patient: None
) -> None:
    quota = Quota(requests_per_minute=2)
    async with counting(redis_server.url, quota, 1) as (one,), one.running():
        one.allowance = Allowance(quota, time.monotonic())
        assert await one.passes()
        with pytest.raises(QuotaExceeded, match="requests of the minute"):
            one.allowance.begin(1, time.monotonic())


async def test_a_key_is_forgotten_once_its_last_request_is_reported(redis_server: Any, patient: None) -> None:
    async with counting(redis_server.url, Quota(requests_per_minute=2), 1) as (one,):
        assert [await one.passes() for _ in range(3)] == [True, True, False]
        await soon(lambda: forgotten(one))


async def test_a_key_whose_request_asks_to_begin_during_a_report_is_not_forgotten(
    redis_server: Any, patient: None
) -> None:
    async with counting(redis_server.url, Quota(streams=2), 1) as (one,), AsyncExitStack() as stack:
        async with one.cluster._reporting:
            reporting = asyncio.create_task(one.cluster._report())
            await asyncio.sleep(0)
            asking = asyncio.create_task(stack.enter_async_context(one.running()))
            await asyncio.sleep(0)
        await asyncio.gather(reporting, asking)
        assert one.cluster._uses[KEY].running == 1


async def forgotten(one: Counting) -> bool:
    return not one.cluster._uses


async def test_no_request_waits_long_for_a_frozen_store_and_each_takes_its_share(own_redis: Any) -> None:
    quota = Quota(streams=6, requests_per_minute=60)
    async with counting(own_redis.url, quota, 3) as orchestrators:
        one = orchestrators[0]
        await soon(lambda: counted(one, 3))
        own_redis.freeze()
        try:
            began = time.monotonic()
            assert await one.passes()
            in_time(time.monotonic() - began < ASK_S + 0.5)
            in_time(max(one.waited) < ASK_S + 0.5)
            await soon(lambda: changed(one, quota))
            assert one.cluster.allowed_here(quota) == Quota(streams=2, requests_per_minute=20)
            began = time.monotonic()
            assert all([await one.passes() for _ in range(20)])
            in_time(time.monotonic() - began < 0.5, "somebody waited for a store that is lost")
        finally:
            own_redis.thaw()
        await soon(lambda: unchanged(one, quota))


async def test_a_report_that_arrives_behind_a_later_one_refuses_nobody(
    redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "STREAMS_MS", 600_000)  # what is reported to run does not expire
    async with counting(redis_server.url, Quota(streams=1)) as (one, other):
        use_quotas, arrives = one.store.use_quotas, asyncio.Event()
        late: list[asyncio.Task[list[QuotaState | None]]] = []

        async def arriving(uses: Sequence[QuotaUse]) -> list[QuotaState | None]:
            await arrives.wait()
            return await use_quotas(uses)

        async def late_once(uses: Sequence[QuotaUse]) -> list[QuotaState | None]:
            if late or not uses:
                return await use_quotas(uses)
            late.append(asyncio.create_task(arriving(uses)))
            return await asyncio.shield(late[0])  # a command arrives though its caller has gone

        monkeypatch.setattr(one.store, "use_quotas", late_once)
        assert await one.passes(), "nobody waits long for the store"
        await soon(lambda: forgotten(one))
        monkeypatch.setattr(cluster_quotas, "ASK_S", 30.0)
        arrives.set()
        await late[0]
        await soon(other.passes)


async def settled(front: Any) -> bool:
    """Whether the store has heard of the end of all of an orchestrator's requests."""
    return not front.service._quotas._uses


async def counted(one: Counting, orchestrators: int) -> bool:
    return one.cluster._orchestrators == orchestrators


async def changed(one: Counting, quota: Quota) -> bool:
    return one.cluster.allowed_here(quota) != quota


async def unchanged(one: Counting, quota: Quota) -> bool:
    return one.cluster.allowed_here(quota) == quota


async def test_two_orchestrators_with_one_store_hold_one_keys_quota(
    world: World, redis_server: Any, tmp_path: Path, patient: None
) -> None:
    (key,) = write_keys(tmp_path / "keys", ["ours"], streams=1)
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    how = {"store": "redis", "redis_url": redis_server.url, "api_keys_file": tmp_path / "keys"}
    first, second = [await world.front([verifier.address], **how) for _ in range(2)]
    async with (
        AsyncClient(first.address, api_key=key) as here,
        AsyncClient(second.address, api_key=key) as there,
    ):
        await soon(here.models)
        await soon(there.models)
        async with here.stream(ids=[5], max_tokens=60) as stream:
            await anext(stream)
            with pytest.raises(QuotaExceeded, match="1 requests of this key run, 1 may"):
                await there.generate(ids=[5], max_tokens=2)
            await stream.completion()
        await soon(lambda: settled(first))  # else its end may come later than the next request asks twice
        assert len((await there.generate(ids=[5], max_tokens=2)).ids) == 2
    assert second.sample("quota_seconds_count") == 2
    assert second.sample("request_errors_total", reason="QuotaExceeded") >= 1
