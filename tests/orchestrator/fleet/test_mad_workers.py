"""Workers that announce too much: too many sources, and addresses where nobody is."""

import asyncio
from typing import Any

import grpc.aio

from orchestrator.fleet.directory import MAX_UNANSWERED
from orchestrator.fleet.fleet import MAX_FIRST_CALLS
from outrider.v1.draft_source_pb2_grpc import add_DraftSourceServicer_to_server
from outrider.v1.registry_pb2_grpc import RegistryStub
from outrider.wire.channel import open_channel
from outrider.wire.names import MAX_SOURCES
from outrider.wire.workers import WorkerEntry, WorkerState, entry_to_wire
from tests.orchestrator.conftest import FakeSource

ANY = "127.0.0.1:0"


def named(opened: Any) -> list[str]:
    return [source.name for source in opened.sources]


async def announce_all(registry: str, entries: list[WorkerEntry]) -> list[grpc.StatusCode]:
    """The status that the registry answers each entry with."""
    async with open_channel(registry) as channel:
        stub = RegistryStub(channel)

        async def announce(entry: WorkerEntry) -> grpc.StatusCode:
            try:
                await stub.Announce(entry_to_wire(entry), timeout=100)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        return await asyncio.gather(*map(announce, entries))


async def test_more_sources_than_a_session_takes_stop_no_request(world: Any) -> None:
    good = [await world.source(name=f"good{number}") for number in range(2)]
    verifier = await world.verifier()
    front = await world.ready(
        await world.front([verifier.address], tuple(good), registry_bind=ANY), sources=3
    )
    await front.client.generate(ids=[5], max_tokens=4)
    names = tuple(f"mad{number}" for number in range(MAX_SOURCES))
    mad = [await world.source(names=tuple(f"{name}.{number}" for name in names)) for number in range(2)]
    entries = [WorkerEntry("drafter", address, WorkerState()) for address in mad]
    assert set(await announce_all(front.registry, entries)) == {grpc.StatusCode.OK}
    await world.ready(front, sources=3 + len(mad) * MAX_SOURCES)
    assert len((await front.client.generate(ids=[5], max_tokens=4)).ids) == 4
    assert len(verifier.opened[-1].sources) == MAX_SOURCES
    assert {"lookup", "good0", "good1", "mad0.0", "mad0.1"} <= set(named(verifier.opened[-1]))
    wanted = await front.client.generate(ids=[5], max_tokens=4, sources=["mad15.1"])
    assert len(wanted.ids) == 4
    assert named(verifier.opened[-1]) == ["mad15.1"]


async def test_a_source_whose_tokens_were_accepted_goes_before_others(world: Any) -> None:
    others = [await world.source(name=f"other{number}") for number in range(MAX_SOURCES)]
    verifier, good = await world.verifier(accepts="good"), await world.source(name="good")
    front = await world.front([verifier.address], (*others, good))
    await world.ready(front, sources=2 + len(others))
    await front.client.generate(ids=[5], max_tokens=4)
    assert "good" not in named(verifier.opened[-1]), "each looks as good as the next"
    await front.client.generate(ids=[5], max_tokens=4, sources=["good"])
    await front.client.generate(ids=[5], max_tokens=4)
    assert "good" in named(verifier.opened[-1])


async def test_a_source_of_more_names_than_a_session_takes_is_not_used(world: Any) -> None:
    verifier = await world.verifier()
    mad = await world.source(names=tuple(f"mad{number}" for number in range(MAX_SOURCES + 1)))
    front = await world.ready(await world.front([verifier.address], (mad,)))
    await world.until(lambda: front.sample("peer_up", peer=mad))
    await front.client.generate(ids=[5], max_tokens=4)
    assert named(verifier.opened[0]) == ["lookup"]
    assert front.sample("peer_refused", peer=mad, reason="name") == 1


async def test_a_flood_of_false_addresses_starts_few_calls_and_pushes_no_worker_out(world: Any) -> None:
    verifier, drafter = await world.verifier(), await world.source()
    front = await world.front([], registry_bind=ANY)
    honest = [
        WorkerEntry("verifier", verifier.address, WorkerState()),
        WorkerEntry("drafter", drafter, WorkerState()),
    ]
    await announce_all(front.registry, honest)
    await world.ready(front, sources=2)
    mute = FakeSource(answers=False)
    server = grpc.aio.server()
    add_DraftSourceServicer_to_server(mute, server)
    port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    try:
        hosts = [f"127.0.{1 + number // 200}.{1 + number % 200}" for number in range(400)]
        flood = [WorkerEntry("drafter", f"{host}:{port}", WorkerState()) for host in hosts]
        statuses = await announce_all(front.registry, flood)
        assert statuses.count(grpc.StatusCode.OK) == MAX_UNANSWERED
        assert statuses.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == len(flood) - MAX_UNANSWERED
        assert set(await announce_all(front.registry, honest)) == {grpc.StatusCode.OK}
        await world.until(lambda: mute.asked)
        await asyncio.sleep(0.5)
        assert mute.most_asked <= MAX_FIRST_CALLS
        assert len((await front.client.generate(ids=[5], max_tokens=4)).ids) == 4
    finally:
        await server.stop(0)
    assert {source.name: source.address for source in verifier.opened[-1].sources}["drafter"] == drafter
