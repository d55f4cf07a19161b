"""A request that waits for its turn is on record, so that a Cancel finds it through another orchestrator."""

import asyncio
from typing import Any

import pytest

from orchestrator.relay.opening_turns import LEAST_AT_ONCE
from orchestrator.store.entries import VERSION, epoch_to_bytes, record_name
from orchestrator.store.redis import RedisStore
from outrider.wire.codec import SessionKey
from outrider.wire.epochs import RANDOM_BITS, wall_clock_ms
from speculative.errors import InvalidRequest, Unavailable
from speculative.stop import FinishReason
from tests.orchestrator.conftest import FakeVerifier, next_id
from tests.orchestrator.fronts import soon
from tests.redis_server import RedisServer

HOUR_MS = 3_600_000


def put_on_record(server: RedisServer, key: SessionKey, epoch: int) -> None:
    """Records an earlier request of the session."""
    fields = {"version": VERSION, "epoch": epoch_to_bytes(epoch), "verifier": "gone:1"}
    fields |= {"choices": "1", "cancelled": "0", "request": epoch_to_bytes(0)}
    server.say("HSET", record_name(key), *[part for pair in fields.items() for part in pair])


@pytest.mark.parametrize("ahead_ms", [0, HOUR_MS], ids=["new", "known under the epoch of a clock ahead"])
async def test_a_cancel_ends_it_and_its_session_s_next_request_is_answered(
    world: Any, redis_server: RedisServer, ahead_ms: int
) -> None:
    verifier = FakeVerifier(per_tick=0)
    await world.serve(verifier)
    front, other = [
        await world.ready(await world.front([verifier.address], store="redis", redis_url=redis_server.url))
        for _ in range(2)
    ]

    def ask(tenant: str, session: str) -> asyncio.Future[Any]:
        request = front.client.generate(ids=[5], tenant=tenant, session=session, max_tokens=4)
        return asyncio.ensure_future(request)

    asked = {"quiet": ask("quiet", "quiet")}
    await world.until(lambda: len(verifier.opened) == 1)
    asked |= {name: ask("burst", name) for name in map(str, range(LEAST_AT_ONCE))}
    await world.until(lambda: len(verifier.opened) == 1 + LEAST_AT_ONCE)
    waiting = "waiting"
    if ahead_ms:
        put_on_record(redis_server, SessionKey("burst", waiting), wall_clock_ms() + ahead_ms << RANDOM_BITS)
    asked |= {waiting: ask("burst", waiting)}

    async def cancelled() -> bool:
        return bool(await other.client.cancel(waiting, tenant="burst"))

    async with asyncio.timeout(30):
        await soon(cancelled)  # the record is written soon
        assert not await cancelled()
        assert (await asked.pop(waiting)).finish_reason is FinishReason.CANCELLED
    verifier.per_tick = 2
    again = ask("burst", waiting)
    for answer in (again, *asked.values()):
        assert list((await answer).ids) == [next_id(position) for position in range(1, 5)]


@pytest.mark.parametrize("is_left", [True, False], ids=["its client left", "its time is over"])
async def test_the_session_s_earlier_request_ends_with_one_that_waited_in_vain(
    world: Any, redis_server: RedisServer, is_left: bool
) -> None:
    verifier = FakeVerifier(per_tick=0)
    await world.serve(verifier)
    one, other = [
        await world.ready(await world.front([verifier.address], store="redis", redis_url=redis_server.url))
        for _ in range(2)
    ]

    def ask(front: Any, tenant: str, session: str, **options: Any) -> asyncio.Future[Any]:
        request = front.client.generate(ids=[5], tenant=tenant, session=session, max_tokens=4, **options)
        return asyncio.ensure_future(request)

    key = SessionKey("burst", "mine")
    earlier = ask(one, *key[:2])
    await world.until(lambda: key in verifier.sessions)
    burst = [
        ask(other, "quiet", "quiet"),
        *(ask(other, "burst", name) for name in map(str, range(LEAST_AT_ONCE))),
    ]
    await world.until(lambda: len(verifier.opened) == 2 + LEAST_AT_ONCE)
    store = RedisStore(redis_server.url)

    async def waits() -> bool:
        record = await store.find(key)
        return record is not None and not record.verifier

    async with asyncio.timeout(30):
        if is_left:
            later = ask(other, *key[:2])
            await soon(waits)
            later.cancel()
        else:
            while verifier.sessions[key].finished is None:  # a busy machine may need more time to record it
                with pytest.raises(Unavailable):
                    await ask(other, *key[:2], timeout=1.0)
        await world.until(lambda: verifier.sessions[key].finished is FinishReason.CANCELLED)
    assert len(verifier.opened) == 2 + LEAST_AT_ONCE  # no request was opened that had no turn
    await store.close()
    verifier.per_tick = 4
    await asyncio.gather(earlier, *burst)


async def test_a_sessions_earlier_request_ends_once_a_waiting_request_is_refused_elsewhere(
    world: Any, redis_server: RedisServer
) -> None:
    holding, refusing = FakeVerifier(per_tick=0), FakeVerifier(per_tick=0)
    await world.serve(holding)
    await world.serve(refusing)
    shared = {"store": "redis", "redis_url": redis_server.url}
    one = await world.ready(await world.front([holding.address], **shared))
    other = await world.ready(await world.front([holding.address, refusing.address], **shared))
    await world.until(lambda: all(other.sample("peer_up", peer=it.address) for it in (holding, refusing)))

    def ask(front: Any, tenant: str, session: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(front.client.generate(ids=[5], tenant=tenant, session=session))

    def opened() -> int:
        return len(holding.opened) + len(refusing.opened)

    key = SessionKey("burst", "mine")
    earlier = ask(one, *key[:2])
    await world.until(lambda: key in holding.sessions)
    burst = [
        ask(other, "quiet", "quiet"),
        *(ask(other, "burst", name) for name in map(str, range(LEAST_AT_ONCE))),
    ]
    await world.until(lambda: opened() == 2 + LEAST_AT_ONCE)
    later = ask(other, *key[:2])
    holding.draining, refusing.refusal = True, InvalidRequest("not here")
    await world.until(lambda: other.service._fleet.draining(holding.address))
    assert await other.client.cancel("0", tenant="burst")  # a turn for the later request
    async with asyncio.timeout(30):
        with pytest.raises(InvalidRequest, match="not here"):
            await later
        await world.until(lambda: holding.sessions[key].finished is FinishReason.CANCELLED)
    holding.draining, refusing.refusal, holding.per_tick, refusing.per_tick = False, None, 4, 4
    await asyncio.gather(earlier, *burst)
