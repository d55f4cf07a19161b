"""Orchestrators share registered workers through Redis; foreign entries there harm nobody."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.store import entries
from outrider.wire.workers import CONTRACT, WorkerEntry, WorkerState
from tests.orchestrator.fleet.test_registry import ANY, announce, announcing, used


async def pair(world: Any, url: str) -> list[Any]:
    return [await world.front([], registry_bind=ANY, store="redis", redis_url=url) for _ in range(2)]


async def test_a_worker_that_registers_with_one_is_used_by_all(world: Any, redis_server: Any) -> None:
    one, other = await pair(world, redis_server.url)
    verifier, drafter = await world.verifier(), await world.source()
    async with (
        announcing("verifier", verifier.address, one.registry),
        announcing("drafter", drafter, one.registry),
    ):
        await world.until(lambda: used(other, verifier.address) and used(other, drafter))
        assert len((await other.client.generate(ids=[5], max_tokens=4)).ids) == 4
    assert [source.name for source in verifier.opened[0].sources] == ["lookup", "drafter"]


async def test_that_it_drains_is_heard_everywhere(world: Any, redis_server: Any) -> None:
    one, other = await pair(world, redis_server.url)
    drafter = await world.source()
    async with announcing("drafter", drafter, one.registry) as announcer:
        await world.until(lambda: used(other, drafter))
        announcer.drain()
        await world.until(lambda: other.sample("peer_draining", peer=drafter))


async def test_a_server_that_is_lost_moves_nobody_and_comes_back_with_all(world: Any, own_redis: Any) -> None:
    one, other = await pair(world, own_redis.url)
    verifier = await world.verifier()
    async with announcing("verifier", verifier.address, one.registry):
        await world.until(lambda: used(other, verifier.address))
        own_redis.kill()
        late = await world.verifier()
        async with announcing("verifier", late.address, one.registry):
            await world.until(lambda: used(one, late.address))
            assert used(other, verifier.address)
            assert len((await other.client.generate(ids=[5], max_tokens=4)).ids) == 4
            own_redis.start()
            await world.until(lambda: used(other, late.address))


def lives(seconds: float = 30.0) -> bytes:
    """The first bytes of an entry: the time when it expires."""
    return f"{int((time.time() + seconds) * 1000):016d}".encode()


def rubbish(address: str) -> Iterator[bytes]:
    yield b""
    yield b"hello"
    yield lives() + b"1{"
    yield lives() + b"1null"
    yield lives() + b"\xff" * 40
    yield lives() + b"1" + b"[" * 5000
    yield lives() + b"1" + b'{"role": "verifier", "address": "%s"}' % address.encode()
    foreign = entries.entry_to_bytes(WorkerEntry("verifier", address, WorkerState()))
    yield lives() + b"2" + foreign[1:]
    yield lives() + entries.entry_to_bytes(WorkerEntry("verifier", address, WorkerState(), CONTRACT + 1))
    yield b"9" * 16 + foreign
    yield lives(-1) + foreign


async def test_rubbish_is_named_once_and_nobody_is_dialled_for_it(
    world: Any, redis_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = await world.verifier(model="wrong")
    for name in (entries.REGISTERED, entries.WORKERS):
        for number, data in enumerate(rubbish(wrong.address)):
            redis_server.say("HSET", name, f"rubbish-{number}", data)
    verifier = await world.verifier()
    one, other = await pair(world, redis_server.url)
    async with announcing("verifier", verifier.address, one.registry):
        await world.until(lambda: used(other, verifier.address))
        for front in (one, other):
            assert len((await front.client.generate(ids=[5], max_tokens=4)).ids) == 4
            assert [model.name for model in await front.client.models()] == ["toy"]
            assert not front.sample("peer_up", peer=wrong.address)
    ignored = [one.fields["name"] for one in caplog.records if "store's entry is ignored" in one.message]
    assert sorted(ignored) == sorted([entries.REGISTERED, entries.WORKERS] * 2), "once by each of two"


async def test_a_hash_that_is_none_leaves_each_with_its_own(world: Any, redis_server: Any) -> None:
    redis_server.say("SET", entries.REGISTERED, "no hash")
    one, other = await pair(world, redis_server.url)
    verifier = await world.verifier()
    async with announcing("verifier", verifier.address, one.registry):
        await world.until(lambda: used(one, verifier.address))
        assert len((await one.client.generate(ids=[5], max_tokens=4)).ids) == 4
    assert await announce(other.registry, WorkerEntry("verifier", verifier.address, WorkerState())) == ""
    await world.until(lambda: used(other, verifier.address))
