"""Workers register over real gRPC, and are used from then on, though no setting names them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from orchestrator.fleet.registry import RegistryServer
from outrider.announcing import Announcer
from outrider.v1 import registry_pb2
from outrider.v1.registry_pb2_grpc import RegistryStub
from outrider.wire.channel import open_channel
from outrider.wire.workers import CONTRACT, WorkerEntry, WorkerState, entry_to_wire
from speculative.errors import Unavailable

ANY = "127.0.0.1:0"


async def front_of(world: Any, **settings: Any) -> Any:
    return await world.front([], registry_bind=ANY, **settings)


async def announce(registry: str, entry: WorkerEntry | registry_pb2.AnnounceRequest) -> str:
    """The registry's answer to one announcement."""
    message = entry_to_wire(entry) if isinstance(entry, WorkerEntry) else entry
    async with open_channel(registry) as channel:
        answer = await RegistryStub(channel).Announce(message, timeout=100)
        return str(answer.refusal)


@contextlib.asynccontextmanager
async def announcing(role: str, address: str, *registries: str, **state: Any) -> AsyncIterator[Announcer]:
    announcer = Announcer(registries, role, address, lambda: WorkerState(**state), every_s=0.1)
    announcer.start()
    try:
        yield announcer
    finally:
        await announcer.stop()


def used(front: Any, address: str) -> bool:
    return bool(front.sample("peer_up", peer=address) and front.sample("peer_registered", peer=address))


async def test_a_worker_that_registers_is_used(world: Any) -> None:
    front = await front_of(world)
    with pytest.raises(Unavailable):
        await front.client.generate(ids=[5])
    verifier, drafter = await world.verifier(), await world.source()
    async with (
        announcing("verifier", verifier.address, front.registry),
        announcing("drafter", drafter, front.registry),
    ):
        await world.until(lambda: used(front, verifier.address) and used(front, drafter))
        assert len((await front.client.generate(ids=[5], max_tokens=4)).ids) == 4
    sources = {source.name: source.address for source in verifier.opened[0].sources}
    assert sources == {"lookup": "", "drafter": drafter}


async def test_one_that_is_given_and_one_that_registers_serve_side_by_side(world: Any) -> None:
    given, other = await world.verifier(), await world.verifier()
    front = await world.front([given.address], registry_bind=ANY)
    async with announcing("verifier", other.address, front.registry):
        await world.until(lambda: used(front, other.address))
        await world.until(lambda: front.sample("peer_up", peer=given.address))
        assert not front.sample("peer_registered", peer=given.address)
        await asyncio.gather(*(front.client.generate(ids=[5], max_tokens=40) for _ in range(6)))
    assert len(given.opened) == len(other.opened) == 3


async def test_one_that_is_gone_is_forgotten_and_one_that_only_fell_silent_is_not(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.fleet.directory.BELIEVED_S", 0.3)
    front = await front_of(world)
    silent, gone = await world.verifier(), await world.verifier()
    await announce(front.registry, WorkerEntry("verifier", silent.address, WorkerState()))
    await announce(front.registry, WorkerEntry("verifier", gone.address, WorkerState()))
    await world.until(lambda: used(front, silent.address) and used(front, gone.address))
    await gone.server.stop(0)
    await world.until(lambda: gone.address not in front.metrics.exposition().decode())
    assert used(front, silent.address)
    await world.serve(gone)
    await announce(front.registry, WorkerEntry("verifier", gone.address, WorkerState()))
    await world.until(lambda: used(front, gone.address))


async def test_a_worker_s_own_count_of_sessions_says_where_there_is_room(world: Any) -> None:
    front = await front_of(world)
    busy, free = await world.verifier(), await world.verifier()
    async with (
        announcing("verifier", busy.address, front.registry, sessions=7, capacity=8),
        announcing("verifier", free.address, front.registry, sessions=0, capacity=8),
    ):
        await world.until(lambda: used(front, busy.address) and used(front, free.address))
        for _ in range(4):
            await front.client.generate(ids=[5], max_tokens=3)
    assert (len(busy.opened), len(free.opened)) == (0, 4)


NO_WORKERS: list[tuple[dict[str, Any], str]] = [
    ({"role": 0}, "role"),
    ({"role": 77}, "role"),
    ({"address": ""}, "host:port"),
    ({"address": "nowhere"}, "host:port"),
    ({"address": "a:0"}, "host:port"),
    ({"address": "a b:1"}, "host:port"),
    ({"address": "a:1,b:2"}, "host:port"),
    ({"address": "dns:a:1"}, "host:port"),
    ({"address": "unix:1"}, "host:port"),
    ({"address": "XDS:1"}, "host:port"),
    ({"address": "a?b:1"}, "host:port"),
    ({"address": "a%2f:1"}, "host:port"),
    ({"address": "a" * 300 + ":1"}, "host:port"),
    ({"model": "m\n"}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"tokenizer_digest": "xyz"}, "tokenizer_digest"),
    ({"capacity": 2**32 - 1}, "capacity"),
    ({"step_us": 2**32 - 1}, "step"),
]


async def test_what_can_be_no_worker_is_refused_by_name(world: Any) -> None:
    front = await front_of(world)
    for rubbish, says in NO_WORKERS:
        fields = {"role": registry_pb2.WORKER_ROLE_VERIFIER, "address": "a:1", **rubbish}
        with pytest.raises(grpc.aio.AioRpcError, match=says) as refused:
            await announce(front.registry, registry_pb2.AnnounceRequest(**fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, rubbish


async def test_one_of_another_contract_is_told_so_and_not_dialled(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    front = await front_of(world)
    verifier = await world.verifier()
    entry = WorkerEntry("verifier", verifier.address, WorkerState(), contract=CONTRACT + 1)
    assert f"version {CONTRACT + 1}" in await announce(front.registry, entry)
    assert f"version {CONTRACT + 1}" in await announce(front.registry, entry)
    assert front.sample("peer_refused", peer=verifier.address, reason="contract") == 1
    assert not front.sample("peer_up", peer=verifier.address)
    assert [one.message for one in caplog.records].count("worker not used") == 1


async def test_a_verifier_that_describes_another_contract_is_not_used(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    odd, plain = await world.verifier(contract=CONTRACT + 1), await world.verifier(contract=CONTRACT)
    front = await world.ready(await world.front([odd.address, plain.address]))
    await world.until(lambda: front.service and odd.address in front.metrics.exposition().decode())
    for _ in range(3):
        await front.client.generate(ids=[5], max_tokens=3)
    assert (len(odd.opened), len(plain.opened)) == (0, 3)
    assert front.sample("peer_refused", peer=odd.address, reason="contract") == 1
    assert [one.message for one in caplog.records].count("worker not used") == 1


async def test_a_verifier_whose_requests_do_not_pass_is_refused_by_name_and_not_used(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    long, short = await world.verifier(max_length=2**20), await world.verifier()
    front = await world.ready(await world.front([long.address, short.address], max_message_mb=1))
    await world.until(lambda: front.sample("peer_refused", peer=long.address, reason="message") == 1)
    for _ in range(3):
        await front.client.generate(ids=[5], max_tokens=3)
    assert (len(long.opened), len(short.opened)) == (0, 3)
    (logged,) = [one for one in caplog.records if one.message == "worker not used"]
    assert "max_message_mb = 1: give 3 or more" in logged.fields["why"]


async def test_other_weights_under_a_model_s_name_are_not_used_and_logged_once(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ours = [await world.verifier(weights="a1") for _ in range(2)]
    other = await world.verifier(weights="b2")
    front = await world.front([other.address, *(one.address for one in ours)])
    for one in (*ours, other):
        await world.until(lambda one=one: front.sample("peer_up", peer=one.address))
    for _ in range(4):
        await front.client.generate(ids=[5], max_tokens=3)
    assert not other.opened
    assert front.sample("peer_refused", peer=other.address, reason="model") == 1
    logged = [one for one in caplog.records if one.message == "worker not used"]
    assert [one.fields["peer"] for one in logged if one.fields["reason"] == "model"][-1] == other.address


async def test_a_request_goes_on_with_the_very_model_that_began_it_or_waits(world: Any) -> None:
    began = await world.verifier(weights="a1", per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([began.address], registry_bind=ANY, recover_s=5))
    stream = front.client.stream(ids=[5], max_tokens=50)
    await anext(stream)
    others = [await world.verifier(weights="b2") for _ in range(2)]
    same = await world.verifier(weights="a1")
    async with contextlib.AsyncExitStack() as stack:
        for one in (*others, same):
            await stack.enter_async_context(announcing("verifier", one.address, front.registry))
            await world.until(lambda one=one: used(front, one.address))
        await began.server.stop(0)
        assert len((await stream.completion()).ids) == 50
    assert [len(one.opened) for one in (*others, same)] == [0, 0, 1]


async def test_nobody_of_another_role_speaks_for_a_verifier_that_was_given(world: Any) -> None:
    given, other = await world.verifier(), await world.verifier()
    front = await world.front([given.address, other.address], registry_bind=ANY)
    await world.until(lambda: front.sample("peer_up", peer=given.address))
    await world.until(lambda: front.sample("peer_up", peer=other.address))
    said = WorkerEntry("drafter", given.address, WorkerState(sessions=500), draining=True)
    await announce(front.registry, said)
    assert not front.sample("peer_draining", peer=given.address)
    assert not front.sample("peer_registered", peer=given.address)
    await asyncio.gather(*(front.client.generate(ids=[5], max_tokens=40) for _ in range(6)))
    assert len(given.opened) == len(other.opened) == 3


async def test_a_drafter_of_a_tokenizer_that_no_target_has_is_named(world: Any, table: Any) -> None:
    verifier = await world.verifier(tokens=table)
    stranger = await world.source(digest="f" * 64)
    front = await world.ready(await world.front([verifier.address], (stranger,)))
    await world.until(lambda: front.sample("peer_up", peer=stranger))
    await front.client.generate(ids=[5], max_tokens=3)
    assert front.sample("peer_refused", peer=stranger, reason="tokenizer") == 1
    assert [source.name for source in verifier.opened[0].sources] == ["lookup"]


async def test_the_announcer_says_once_why_it_is_not_used(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    front = await front_of(world)
    ours, other = [await world.verifier(weights="a1") for _ in range(2)], await world.verifier(weights="b2")
    async with contextlib.AsyncExitStack() as stack:
        for one in ours:
            await stack.enter_async_context(announcing("verifier", one.address, front.registry))
            await world.until(lambda one=one: used(front, one.address))
        caplog.clear()
        await stack.enter_async_context(announcing("verifier", other.address, front.registry))
        await world.until(lambda: any("not used there" in one.message for one in caplog.records))
        await asyncio.sleep(0.4)
    assert sum("not used there" in one.message for one in caplog.records) == 1


async def test_registries_come_and_go_and_the_announcer_finds_them_again(world: Any) -> None:
    verifier = await world.verifier()
    async with announcing("verifier", verifier.address, "127.0.0.1:1") as announcer:
        await asyncio.sleep(0.3)
        assert announcer.running
    front = await front_of(world)
    async with announcing("verifier", verifier.address, f"dns:localhost:{front.registry.rpartition(':')[2]}"):
        await world.until(lambda: used(front, verifier.address))


async def test_a_port_that_is_taken_is_an_error(world: Any) -> None:
    front = await front_of(world)
    with pytest.raises(Unavailable, match=r"cannot serve the registry on .* another process uses port"):
        RegistryServer(front.service, None, front.registry)
