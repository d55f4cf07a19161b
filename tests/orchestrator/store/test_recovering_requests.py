"""A request that lost its verifier is on record while it waits for another one: a Cancel finds it."""

import asyncio
from typing import Any

import pytest

from orchestrator.relay.request_state import RecoveryPauses
from orchestrator.store.redis import RedisStore
from outrider.wire.codec import SessionKey
from speculative.errors import Unavailable
from speculative.stop import FinishReason
from tests.orchestrator.conftest import FakeVerifier
from tests.orchestrator.fronts import soon
from tests.redis_server import RedisServer

KEY = SessionKey("us", "mine")


async def test_a_cancel_through_another_orchestrator_ends_it(world: Any, redis_server: RedisServer) -> None:
    lost, full = FakeVerifier(per_tick=0), FakeVerifier(refusal=Unavailable("no room"))
    for verifier in (lost, full):
        await world.serve(verifier)
    one, other = [
        await world.ready(
            await world.front([lost.address, full.address], store="redis", redis_url=redis_server.url)
        )
        for _ in range(2)
    ]
    store = RedisStore(redis_server.url)

    async def waits() -> bool:
        record = await store.find(KEY)
        return record is not None and not record.verifier

    request = one.client.generate(ids=[5], tenant=KEY.tenant, session=KEY.session, max_tokens=4)
    answer = asyncio.ensure_future(request)
    await world.until(lambda: KEY in lost.sessions)
    await lost.server.stop(None)
    async with asyncio.timeout(60):
        await soon(waits)
        assert await other.client.cancel(KEY.session, tenant=KEY.tenant)
        full.refusal, full.per_tick = None, 0
        assert (await answer).finish_reason is FinishReason.CANCELLED
    assert one.service._ledger.waiting == 0, "nothing of it is left to renew"
    await store.close()


async def test_a_cancel_through_another_orchestrator_ends_it_where_no_verifier_is_left(
    world: Any, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    def next_s(_: RecoveryPauses) -> float:
        begun.set()
        return 600.0

    monkeypatch.setattr(RecoveryPauses, "next_s", next_s)
    lost = FakeVerifier(per_tick=0)
    await world.serve(lost)
    one, other = [
        await world.ready(await world.front([lost.address], store="redis", redis_url=redis_server.url))
        for _ in range(2)
    ]
    request = one.client.generate(ids=[5], tenant=KEY.tenant, session=KEY.session, max_tokens=4)
    answer = asyncio.ensure_future(request)
    await world.until(lambda: KEY in lost.sessions)
    await lost.server.stop(None)
    store = RedisStore(redis_server.url)

    async def waits() -> bool:
        record = await store.find(KEY)
        return record is not None and not record.verifier

    async with asyncio.timeout(60):
        await begun.wait()
        await soon(waits)
        assert await other.client.cancel(KEY.session, tenant=KEY.tenant)
        assert (await answer).finish_reason is FinishReason.CANCELLED
    await store.close()


async def test_one_that_no_verifier_takes_leaves_no_record(world: Any, redis_server: RedisServer) -> None:
    lost = FakeVerifier(per_tick=0)
    await world.serve(lost)
    front = await world.ready(
        await world.front([lost.address], store="redis", redis_url=redis_server.url, recover_s=1.0)
    )
    store = RedisStore(redis_server.url)
    request = front.client.generate(ids=[5], tenant=KEY.tenant, session=KEY.session, max_tokens=4)
    answer = asyncio.ensure_future(request)
    await world.until(lambda: KEY in lost.sessions)
    await lost.server.stop(None)
    with pytest.raises(Unavailable):
        await answer
    assert front.service._ledger.waiting == 0

    async def is_forgotten() -> bool:
        return await store.find(KEY) is None

    async with asyncio.timeout(60):
        await soon(is_forgotten)
    await store.close()
