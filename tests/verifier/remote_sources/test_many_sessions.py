"""Messages that speak of all of a verifier's sessions stay small enough for any peer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
from fake_source import FakeSource
from harness import QUICK, eventually

from outrider.v1 import verifier_pb2
from outrider.v1.draft_source_pb2_grpc import add_DraftSourceServicer_to_server
from outrider.wire.channel import server_options
from outrider.wire.codec import MAX_CHOICES, MAX_NAME, SessionKey, key_to_wire
from speculative.hashing import prefix_hash
from speculative.logprobs import Logprobs, TokenLogprob
from speculative.params import SamplingParams
from speculative.stats import UsageCount
from speculative.stop import FinishReason
from verifier_service.engine.messages import Finish, Update
from verifier_service.engine.stats import CountsByName
from verifier_service.remote_sources.link import SourceLink
from verifier_service.remote_sources.source_rests import SourceActivity
from verifier_service.remote_sources.subscription import Subscription
from verifier_service.sessions.request import SessionRequest, SourceAddress
from verifier_service.sessions.table import SessionTable, SessionView
from verifier_service.sessions.watch import WatchReaders

SESSIONS = 64
LONG = 50_000
HIGH = 200_000
"""A token id that takes three bytes in a message, as those of large vocabularies do."""
MIB = 2**20


def request(number: int, ids: tuple[int, ...], logprobs: Logprobs | None = None) -> SessionRequest:
    return SessionRequest(
        key=SessionKey("t" * MAX_NAME, f"{number:0{MAX_NAME}}"),
        epoch=1 << 50,
        ids=ids,
        prompt_length=len(ids),
        limit=2 * LONG,
        params=SamplingParams(logit_bias=tuple((HIGH + place, 1.5) for place in range(300))),
        seed=7,
        stops=(),
        time_left_s=None,
        node_limit=16,
        sources=(),
        logprobs=logprobs,
    )


def view(number: int, ids: tuple[int, ...]) -> SessionView:
    return SessionView(number, request(number, ids), ("drafter",), {1: SourceAddress("drafter", "")}, None)


def subscription(number: int) -> Subscription:
    known = view(number, (HIGH,) * LONG)
    return Subscription(known, (1,), ("drafter",), "m", "d", 1 << 18, SourceActivity())


@asynccontextmanager
async def a_source_of_1_mib_messages() -> AsyncIterator[tuple[FakeSource, str]]:
    source = FakeSource()
    server = grpc.aio.server(options=server_options(max_message_mb=1))
    add_DraftSourceServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield source, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_all_long_sessions_are_followed_by_a_source_that_takes_little_at_once() -> None:
    """3.2 million tokens take 9.2 MiB, more than any default allows one message."""
    async with a_source_of_1_mib_messages() as (source, address):
        link = SourceLink(address, lambda command: None, CountsByName(), replace(QUICK, write_s=30.0))
        try:
            for number in range(1, SESSIONS + 1):
                link.subscribe(subscription(number), resting=False)
            await eventually(lambda: len(source.follows) == SESSIONS)
            ids = (HIGH + 1,)
            for number in range(1, SESSIONS + 1):
                hashed = prefix_hash((HIGH,) * LONG + ids)
                link.progress(Update(number, LONG, ids, b"\1", hashed), resting=False)
            await eventually(lambda: len(source.progress) == SESSIONS)
        finally:
            await link.stream.close()
    assert source.streams == 1, "no message broke the stream"
    assert {len(follow.ids) for follow in source.follows} == {LONG}
    assert source.messages > 9


def test_a_follow_takes_no_more_bytes_than_the_link_reckons_with() -> None:
    following = subscription(1)
    assert following.message(1 << 20).ByteSize() <= following.follow_bytes


async def collected(
    readers: WatchReaders, adds: list[verifier_pb2.Cursor]
) -> list[verifier_pb2.WatchResponse]:
    """What a stream answers until every cursor has ended."""
    reader = readers.open()
    reader.request(verifier_pb2.WatchRequest(add=adds))
    ended, responses = set[int](), list[verifier_pb2.WatchResponse]()
    async for response in reader.responses():
        responses.append(response)
        ended |= {committed.alias for committed in response.committed if committed.finished}
        if len(ended) == len(adds):
            return responses
    raise AssertionError


async def test_a_watch_of_many_ended_sessions_with_log_probabilities_comes_in_small_messages() -> None:
    table, adds = SessionTable(), []
    token = TokenLogprob.of(-0.5, range(HIGH, HIGH + 20), [-1.5] * 20)
    for number in range(SESSIONS):
        known = SessionView(number, request(number, (1, 2, 3), Logprobs(20)), ("drafter",), {}, None)
        table.add(known)
        known.ids += [HIGH] * 1000
        known.token_sources += bytes(1000)
        known.logprobs += [token] * 1000
        known.finish = Finish(FinishReason.LENGTH, UsageCount(3, completion_tokens=1000))
        key = key_to_wire(known.key)
        adds.append(verifier_pb2.Cursor(alias=number + 1, key=key, epoch=known.epoch, position=3))
    responses = await collected(WatchReaders(table), adds)
    assert sum(response.ByteSize() for response in responses) > 8 * MIB
    assert max(response.ByteSize() for response in responses) < MIB


async def test_a_watch_of_ten_thousand_unknown_sessions_comes_in_small_messages() -> None:
    adds = [
        verifier_pb2.Cursor(
            alias=number, key=key_to_wire(SessionKey("t", f"{number:0{MAX_NAME}}", number % MAX_CHOICES))
        )
        for number in range(10_000)
    ]
    responses = await collected(WatchReaders(SessionTable()), adds)
    assert max(response.ByteSize() for response in responses) < MIB
