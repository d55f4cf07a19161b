"""Requests whose client's device drafts: what reaches the verifier, and what bad devices cost."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import pytest

from orchestrator.edge.devices import DeviceFlow
from orchestrator.front.generating import Incoming, _heard
from outrider.v1 import draft_source_pb2, generation_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceStub
from outrider.wire.channel import open_channel
from outrider.wire.tls import SOURCE, Certificates, Files
from speculative.hashing import prefix_hash
from tests.certificates import Authority
from tests.edge_device import OverGrpc, over_grpc, request_of, window
from tests.orchestrator.fronts import orchestrator

PROMPT = (5, 6, 7)
EDGE = {"edge_bind": "127.0.0.1:0"}
PER_TOKEN = 8


class Following:
    """A verifier's stream to the source `edge`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.drafts: list[draft_source_pb2.Draft] = []
        self.refusals: list[draft_source_pb2.Refusal] = []
        self.waits: list[tuple[int, int]] = []

    async def follow(self, opened: Any, alias: int = 0, **changed: Any) -> None:
        follow = draft_source_pb2.Follow(
            alias=alias,
            key=opened.key,
            epoch=opened.epoch,
            ids=opened.ids,
            prompt_length=opened.prompt_length,
            limit=opened.limit,
            vocabulary_size=96,
            sources=["edge"],
        )
        follow.MergeFrom(draft_source_pb2.Follow(**changed))
        await self._call.write(draft_source_pb2.AttachRequest(follow=[follow]))

    async def read(self) -> None:
        async for response in self._call:
            self.drafts += response.drafts
            self.refusals += response.refusals
            self.waits += [(wait.alias, wait.ms) for wait in response.waits]


@asynccontextmanager
async def attached(address: str) -> AsyncIterator[Following]:
    async with open_channel(address) as channel:
        call = DraftSourceStub(channel).Attach()  # type: ignore[no-untyped-call]  # a stub of either kind
        following = Following(call)
        reading = asyncio.create_task(following.read())
        try:
            yield following
        finally:
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def begun(world: Any, wire: OverGrpc, verifier: Any, **options: Any) -> Any:
    """Sends a request that goes on until `verifier` is let on; returns what the verifier was told of it."""
    known = len(verifier.opened)
    await wire.send(request_of(PROMPT, max_tokens=40, **options))
    await world.until(lambda: len(verifier.opened) > known)
    return verifier.opened[-1]


def edge_of(opened: Any) -> str:
    """Where the verifier finds the devices' drafts."""
    return next(str(source.address) for source in opened.sources if source.name == "edge")


async def whole(wire: OverGrpc) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in wire.responses()]


def ids_in(responses: list[generation_pb2.GenerateResponse]) -> list[int]:
    return [id_ for response in responses for id_ in response.tokens.ids]


def expected(count: int = 40) -> list[int]:
    return [2 + (position * 7) % 94 for position in range(len(PROMPT), len(PROMPT) + count)]


async def test_drafts_reach_the_verifier_that_follows_the_session_under_its_epoch(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    async with over_grpc(front.address) as wire:
        opened = await begun(world, wire, verifier)
        assert [source.name for source in opened.sources] == ["lookup", "edge"]
        await wire.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [1, 2, 3])))
        async with attached(edge_of(opened)) as following:
            await following.follow(opened, alias=4)
            await wire.send(generation_pb2.GenerateRequest(drafts=window((*PROMPT, 1, 2, 3), [4])))
            await world.until(lambda: len(following.drafts) == 2)
            assert front.sample("edge_sessions") == front.sample("edge_sessions_followed") == 1
        verifier.per_tick = 8
        responses = await whole(wire)
    assert ids_in(responses) == expected()
    assert [(draft.alias, draft.epoch, list(draft.ids)) for draft in following.drafts] == [
        (4, opened.epoch, [1, 2, 3]),
        (4, opened.epoch, [4]),
    ]
    assert responses[-1].finished.device == generation_pb2.DeviceUsage(windows=2, nodes=4, forwarded=4)
    assert front.sample("edge_nodes_forwarded_total") == 4
    assert front.sample("edge_sessions") == 0


async def test_a_device_is_told_what_it_needs_to_draft(world: Any, table: Any) -> None:
    verifier = await world.verifier(per_tick=8, tokens=table)
    front = await world.ready(await world.front([verifier.address], edge_credits=100, **EDGE))
    async with over_grpc(front.address) as wire:
        await wire.send(request_of(PROMPT, max_tokens=9, temperature=0.5, top_k=3, stop_ids=[8], nodes=12))
        responses = await whole(wire)
    terms = responses[0].started.device
    assert terms.tokenizer_digest == table.digest
    assert (terms.vocabulary_size, terms.limit, terms.node_limit) == (96, 12, 24)
    assert (terms.sampling.temperature, terms.sampling.top_k) == (0.5, 3)
    assert list(terms.end_ids) == [1, 8]
    assert (terms.credits, terms.credits_per_token, terms.most_wait_ms) == (100, 32, 1000)
    assert not terms.refused
    hashes = [response.tokens.prefix_hash for response in responses if response.HasField("tokens")]
    assert hashes[-1] == prefix_hash((*PROMPT, *expected(9)))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no port for verifiers": ({}, "", "started without edge_bind"),
    "another vocabulary": (EDGE, "ab" * 32, "their ids mean different tokens"),
    "more devices than the tenant may have": ({**EDGE, "edge_devices_per_tenant": 1}, "", "its limit here"),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_a_request_whose_device_is_refused_goes_on_without_it(world: Any, why: str) -> None:
    settings, digest, said = REFUSED[why]
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **settings))
    async with over_grpc(front.address) as first, over_grpc(front.address) as second:
        await begun(world, first, verifier)
        request = request_of(PROMPT, max_tokens=40, sources=["edge"])
        request.start.device.tokenizer_digest = digest
        await second.send(request)
        await second.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [1])))
        verifier.per_tick = 8
        responses = await whole(second)
    assert said in responses[0].started.device.refused
    assert ids_in(responses) == expected()
    assert not verifier.opened[1].sources
    assert not responses[-1].finished.HasField("device")


def _million() -> list[generation_pb2.GenerateRequest]:
    drafts = generation_pb2.DeviceDrafts(base=3, ids=[1] * 1_000_000, survival=b"\xff")
    return [generation_pb2.GenerateRequest(drafts=drafts)]


def _replays() -> list[generation_pb2.GenerateRequest]:
    return [generation_pb2.GenerateRequest(drafts=window(PROMPT, [1] * 8))] * 500


BAD: dict[str, tuple[Callable[[], list[generation_pb2.GenerateRequest]], str]] = {
    "a million tokens": (_million, ""),
    "old windows again and again": (_replays, "credit"),
    "another request": (lambda: [request_of(PROMPT)], ""),
    "a choice that nobody asked for": (
        lambda: [generation_pb2.GenerateRequest(drafts=window(PROMPT, [1], choice=3))],
        "",
    ),
    "an epoch that never was": (
        lambda: [generation_pb2.GenerateRequest(drafts=window(PROMPT, [1], epoch=2**63))],
        "",
    ),
    "ids beyond the vocabulary": (
        lambda: [generation_pb2.GenerateRequest(drafts=window(PROMPT, [96]))],
        "malformed",
    ),
    "windows of nothing that was sent": (
        lambda: [generation_pb2.GenerateRequest(drafts=window((9, 9, 9, 9), [1]))],
        "stale",
    ),
    "nothing at all": (lambda: [generation_pb2.GenerateRequest()], ""),
}


def sent_on(following: Following, alias: int) -> int:
    """Nodes of one session that a verifier was sent."""
    return sum(len(draft.ids) for draft in following.drafts if draft.alias == alias)


@pytest.mark.parametrize("what", BAD)
async def test_a_hostile_device_wastes_its_own_credits_alone(world: Any, what: str) -> None:
    make, reason = BAD[what]
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(
        await world.front([verifier.address], edge_credits=64, edge_credits_per_token=PER_TOKEN, **EDGE)
    )
    async with over_grpc(front.address) as bad, over_grpc(front.address) as good:
        spoilt = await begun(world, bad, verifier, session="bad")
        fine = await begun(world, good, verifier, session="good")
        async with attached(edge_of(fine)) as following:
            await following.follow(spoilt, alias=1)
            await following.follow(fine, alias=2)
            for request in make():
                await bad.send(request)
            await good.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [1, 2])))
            await world.until(lambda: [draft for draft in following.drafts if draft.alias == 2])
            if reason:  # nothing says which of two streams is heard first
                await world.until(lambda: front.sample("edge_nodes_dropped_total", reason=reason))
            verifier.per_tick = 8
            answers = await asyncio.gather(whole(bad), whole(good))
            spent = answers[0][-1].finished.device
            await world.until(lambda: sent_on(following, 1) == spent.forwarded)
    assert [ids_in(answer) for answer in answers] == [expected(), expected()]
    # The first credits, and those that the tokens of its own answer brought.
    assert spent.forwarded <= 64 + PER_TOKEN * len(expected())
    assert spent.nodes == spent.forwarded + sum(spent.dropped.values())
    assert not reason or spent.dropped[reason] > 0
    assert answers[1][-1].finished.device.forwarded == 2


async def test_a_device_that_vanishes_leaves_nothing_behind(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    async with over_grpc(front.address) as wire:
        opened = await begun(world, wire, verifier)
        await wire.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [1, 2])))
        await world.until(lambda: front.sample("edge_nodes_forwarded_total") == 2)
    await world.until(lambda: front.sample("edge_sessions") == 0)
    async with attached(edge_of(opened)) as following:
        await following.follow(opened)
        await world.until(lambda: following.refusals)
    assert "no device drafts for session" in following.refusals[0].message
    assert front.sample("edge_nodes_dropped_total", reason="unplaced") == 2


async def test_a_device_that_stops_sending_costs_its_session_nothing(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    async with over_grpc(front.address) as wire:
        opened = await begun(world, wire, verifier, wait_ms=5000)
        async with attached(edge_of(opened)) as following:
            await following.follow(opened, alias=1)
            await world.until(lambda: following.waits)
            await wire.done()
            await world.until(lambda: len(following.waits) == 2)
        verifier.per_tick = 8
        assert ids_in(await whole(wire)) == expected()
    assert following.waits == [(1, 1000), (1, 0)], (
        "no longer than most_wait_ms, and not for a device that left"
    )


async def test_of_two_that_resume_at_once_the_later_one_drafts(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    async with over_grpc(front.address) as first, over_grpc(front.address) as second:
        await begun(world, first, verifier, session="mine")
        opened = await begun(world, second, verifier, session="mine")
        async with attached(edge_of(opened)) as following:
            await following.follow(opened)
            with pytest.raises(grpc.aio.AioRpcError, match="took over session"):
                await whole(first)
            await second.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [3])))
            await world.until(lambda: following.drafts)
        verifier.per_tick = 8
        assert ids_in(await whole(second)) == expected()


async def test_a_session_id_of_another_tenant_is_another_session(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    async with over_grpc(front.address) as ours, over_grpc(front.address) as theirs:
        opened = await begun(world, ours, verifier, session="one", tenant="us")
        await begun(world, theirs, verifier, session="one", tenant="them")
        async with attached(edge_of(opened)) as following:
            await following.follow(opened)
            await theirs.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [66])))
            await ours.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [3])))
            await world.until(lambda: following.drafts)
            await world.until(lambda: front.sample("edge_nodes_forwarded_total") == 2)
    assert [list(draft.ids) for draft in following.drafts] == [[3]]


async def test_a_device_stays_when_its_verifier_is_lost(world: Any) -> None:
    first, second = await world.verifier(per_tick=0), await world.verifier(per_tick=0)
    front = await world.ready(
        await world.front([first.address, second.address], silent_s=0.3, recover_s=30, **EDGE)
    )
    async with over_grpc(front.address) as wire:
        await wire.send(request_of(PROMPT, max_tokens=40))
        await world.until(lambda: first.opened or second.opened)
        lost, other = (first, second) if first.opened else (second, first)
        lost.per_tick = 2
        responses = wire.responses()
        have = [*PROMPT]
        while len(have) < len(PROMPT) + 4:
            have += (await anext(responses)).tokens.ids
        lost.per_tick = 0
        lost.silent, lost.answers = True, False
        await world.until(lambda: other.opened)
        opened = other.opened[0]
        async with attached(edge_of(opened)) as following:
            await following.follow(opened)
            await wire.send(generation_pb2.GenerateRequest(drafts=window(have, [1, 2])))
            await world.until(lambda: following.drafts)
            assert following.drafts[0].epoch == opened.epoch
            other.per_tick = 8
            rest = [response async for response in responses]
            have += ids_in(rest)
    assert have == [*PROMPT, *expected()]


@pytest.mark.parametrize("at", [0, 1], ids=["the same orchestrator", "another one"])
async def test_a_device_that_slept_goes_on_behind_the_tokens_that_it_has(world: Any, at: int) -> None:
    verifier = await world.verifier(per_tick=0)
    fronts = [await world.ready(await world.front([verifier.address], **EDGE)) for _ in range(2)]
    async with over_grpc(fronts[0].address) as wire:
        await begun(world, wire, verifier, session="mine", seed=3)
        verifier.per_tick = 4
        await world.until(lambda: max(session.length for session in verifier.sessions.values()) > 10)
        verifier.per_tick = 0
    request = request_of(PROMPT, max_tokens=40, session="mine", seed=3)
    request.start.have.add(ids=expected(4))

    async with over_grpc(fronts[at].address) as wire:
        have = (*PROMPT, *expected(4))
        await wire.send(request)
        await world.until(lambda: len(verifier.opened) == 2)
        async with attached(edge_of(verifier.opened[1])) as following:
            await following.follow(verifier.opened[1])
            await wire.send(generation_pb2.GenerateRequest(drafts=window(have, [9])))
            await world.until(lambda: following.drafts)
        verifier.per_tick = 8
        assert ids_in(await whole(wire)) == expected()[4:]
    assert (edge_of(verifier.opened[0]) == edge_of(verifier.opened[1])) == (at == 0)


async def test_a_device_of_many_choices_drafts_for_each(world: Any) -> None:
    verifier = await world.verifier(per_tick=8)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    async with over_grpc(front.address) as wire:
        await wire.send(request_of(PROMPT, max_tokens=40, n=2))
        for choice in (0, 1):
            drafts = window(PROMPT, [1, 2], choice=choice)
            await wire.send(generation_pb2.GenerateRequest(drafts=drafts))
        responses = await whole(wire)
    finished = [response.finished for response in responses if response.HasField("finished")]
    assert sorted(it.choice for it in finished) == [0, 1]


async def test_the_port_for_verifiers_takes_no_other_certificate(tmp_path: Path, world: Any) -> None:
    ours = Authority(tmp_path)
    verifier = await world.verifier(per_tick=0)
    settings = {"verifier": [verifier.address], **EDGE, **ours.role("orchestrator", "source")}
    async with orchestrator(**settings) as said:
        for role in ("drafter", "verifier"):
            shown = Certificates(Files(*ours.role(role).values(), own_ca=True))
            async with open_channel(said["edge"], certificates=shown, role=SOURCE) as channel:
                stub: Any = DraftSourceStub(channel)  # type: ignore[no-untyped-call]  # a stub of either kind
                if role == "verifier":
                    described = await stub.Describe(draft_source_pb2.SourceDescribeRequest())
                    assert described.name == "edge"
                    assert (described.HasField("learns"), described.learns) == (True, False)
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="names no role that may call"):
                    await stub.Describe(draft_source_pb2.SourceDescribeRequest())


def _mutants(count: int) -> list[bytes]:
    """Messages that differ from a device's in some bytes, and messages of random bytes."""
    draw = random.Random(7)
    legal = generation_pb2.GenerateRequest(drafts=window(PROMPT, [1, 2, 3], wait_ms=1)).SerializeToString()
    made = []
    for _ in range(count):
        data = bytearray(legal)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        made.append(bytes(data) if draw.random() < 0.9 else draw.randbytes(draw.randrange(40)))
    return made


async def test_whatever_bytes_follow_a_request_its_answer_comes(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address], **EDGE))
    start = request_of(PROMPT, max_tokens=12).SerializeToString()
    async with grpc.aio.insecure_channel(front.address) as channel:

        async def answered(mutant: bytes) -> list[int]:
            call = channel.stream_stream("/outrider.v1.Generation/Generate")()
            await call.write(start)
            await call.write(mutant)
            await call.write(mutant)
            responses = [generation_pb2.GenerateResponse.FromString(data) async for data in call]
            return ids_in(responses)

        asking = asyncio.gather(*map(answered, _mutants(120)))
        await world.until(lambda: len(verifier.opened) == 120)
        verifier.per_tick = 8
        answers = await asking
    assert answers == [expected(12)] * 120
    assert front.sample("edge_sessions") == 0
    assert front.sample("request_errors_total", reason="internal") == 0


async def test_a_stream_that_is_cancelled_while_its_device_is_let_go_is_cancelled_all_the_same() -> None:
    hears, left, ending = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> AsyncIterator[Incoming]:
        try:
            hears.set()
            await asyncio.Event().wait()
            yield generation_pb2.GenerateRequest()
        finally:
            ending.set()
            await asyncio.sleep(60)

    async def answered() -> None:
        async with _heard(mock.Mock(DeviceFlow), slow_to_end()):
            await left.wait()

    answering = asyncio.create_task(answered())
    await hears.wait()
    left.set()
    await ending.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
