"""A verifier is lost and another one goes on: the client gets every id once, and the costs add up."""

import asyncio
import time
from typing import Any

import pytest
from grpc.aio import AioRpcError

from orchestrator.relay.request_state import RecoveryPauses
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.codec import SessionKey
from speculative.errors import Superseded, Unavailable
from speculative.stop import FinishReason
from tests.in_time import in_time

QUICK = {"silent_s": 0.6}
LIMIT = 60
WHOLE = tuple(2 + (position * 7) % 94 for position in range(1, LIMIT))


async def two(world: Any, **settings: Any) -> tuple[Any, Any, Any]:
    """A front, the verifier that its next request goes to, and the other one."""
    first = await world.verifier(per_tick=1, tick_s=0.02)
    second = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.front([first.address, second.address], **settings)
    await world.until(lambda: front.sample("peer_up", peer=first.address))
    await world.until(lambda: front.sample("peer_up", peer=second.address))
    return await world.ready(front), first, second


def freeze(verifier: Any) -> None:
    verifier.silent, verifier.answers = True, False


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["killed", "frozen", "forgetful"])
async def test_the_stream_goes_on_at_the_next_position(world: Any, how: str, n: int) -> None:
    front, first, second = await two(world, **(QUICK if how == "frozen" else {}))
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, n=n, seed=7)
    await anext(stream)
    await world.until(lambda: all(session.length > 8 for session in first.sessions.values()))
    match how:
        case "killed":
            await first.server.stop(0)
        case "frozen":
            freeze(first)
        case "forgetful":
            await first.server.stop(0)
            first.sessions.clear()
            await world.serve(first)
    completion = await stream.completion()
    assert {choice.ids for choice in completion.choices} == {WHOLE}
    assert len(first.opened) + len(second.opened) == 2 * n
    for choice in completion.choices:
        assert choice.usage.completion_tokens == LIMIT - 1
        assert choice.usage.recoveries == 1
    assert front.sample("recovery_seconds_count") == 1


async def test_it_is_opened_as_one_that_was_admitted_with_what_the_client_has(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, temperature=0.5, seed=7, stop_ids=[1])
    got = [id_ for _ in range(3) for id_ in (await anext(stream)).ids]
    await first.server.stop(0)
    await stream.completion()
    (before,), (after,) = first.opened, second.opened
    assert after.recovered
    assert not before.recovered
    assert after.epoch > before.epoch
    assert tuple(after.ids)[: 1 + len(got)] == (5, *got)
    for message in (before, after):
        message.ClearField("ids")
        message.ClearField("epoch")
        message.ClearField("recovered")
    assert after == before


@pytest.mark.parametrize("more", [0, 1])
async def test_a_verifier_is_asked_for_no_source_that_only_the_other_one_has(world: Any, more: int) -> None:
    inside = [("lookup",), ("lookup", "eagle")]
    first = await world.verifier(per_tick=1, tick_s=0.02, local_sources=inside[more])
    second = await world.verifier(per_tick=1, tick_s=0.02, local_sources=inside[1 - more])
    front = await world.front([first.address, second.address])
    for verifier in (first, second):
        await world.until(lambda verifier=verifier: front.sample("peer_up", peer=verifier.address))
    await world.ready(front)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    holder = first if first.opened else second
    await holder.server.stop(0)
    assert (await stream.completion()).ids == WHOLE
    for verifier in (first, second):
        for message in verifier.opened:
            assert {source.name for source in message.sources} <= set(verifier.local_sources)
            assert "lookup" in {source.name for source in message.sources}


@pytest.mark.parametrize("inside", [(("eagle", "lookup"), ("lookup",)), (("eagle",), ())])
async def test_tokens_keep_the_names_of_their_sources_where_the_next_verifier_has_others(
    world: Any, inside: tuple[tuple[str, ...], ...]
) -> None:
    how = {"per_tick": 2, "tick_s": 0.02}
    first, second = [await world.verifier(local_sources=names, drafts=bool(names), **how) for names in inside]
    front = await world.ready(await world.front([first.address]))
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    port = int(first.address.rpartition(":")[2])
    await first.server.stop(0)
    second.address = f"127.0.0.1:{port}"
    await world.serve(second)
    completion = await stream.completion()
    assert completion.ids == WHOLE
    assert set(completion.sources) == {"target", *(names[0] for names in inside if names)}
    assert completion.usage.accepted_by_source == {"eagle": completion.sources.count("eagle")}


async def test_what_is_finished_is_not_opened_again(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, n=2, seed=7)
    await anext(stream)
    ended = first.sessions[SessionKey("default", first.opened[0].key.session, 0)]
    ended.length = LIMIT
    await world.until(lambda: front.sample("peer_sessions", peer=first.address) == 1)
    await first.server.stop(0)
    completion = await stream.completion()
    assert [opened.key.choice for opened in second.opened] == [1]
    assert [choice.usage.recoveries for choice in completion.choices] == [0, 1]


async def test_a_request_without_any_verifier_left_waits_for_one(world: Any) -> None:
    front, first, second = await two(world)
    await second.server.stop(0)
    await world.until(lambda: not front.sample("peer_up", peer=second.address))
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    await first.server.stop(0)
    await asyncio.sleep(1.0)
    await world.serve(second)
    assert (await stream.completion()).ids == WHOLE


async def test_it_is_lost_again_and_goes_on_again(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    await first.server.stop(0)
    await world.until(lambda: second.opened)
    first.sessions.clear()
    await world.serve(first)
    await world.until(lambda: front.sample("peer_up", peer=first.address))
    await second.server.stop(0)
    completion = await stream.completion()
    assert completion.ids == WHOLE
    assert completion.usage.recoveries == 2
    assert completion.usage.completion_tokens == LIMIT - 1


async def test_a_frozen_verifier_that_wakes_adds_nothing(world: Any) -> None:
    front, first, second = await two(world, **QUICK)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    freeze(first)
    await world.until(lambda: second.opened)
    first.silent, first.answers = False, True
    assert (await stream.completion()).ids == WHOLE


async def test_what_the_orchestrator_itself_slept_through_is_no_verifiers_silence(world: Any) -> None:
    front, _, second = await two(world, **QUICK)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    time.sleep(2 * QUICK["silent_s"])  # noqa: ASYNC251  # as where a busy machine takes the core away
    completion = await stream.completion()
    assert completion.ids == WHOLE
    in_time(not second.opened, "a machine that is busy on and off may look like a silent verifier")
    assert completion.usage.recoveries == 0


async def test_a_later_request_ends_one_that_is_recovering(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, session="mine")
    await anext(stream)
    await second.server.stop(0)
    await first.server.stop(0)
    await asyncio.sleep(0.2)
    await world.serve(second)
    await world.until(lambda: front.sample("peer_up", peer=second.address))
    later = front.client.stream(ids=[5], max_tokens=4, session="mine")
    with pytest.raises(Superseded):
        await stream.completion()
    assert (await later.completion()).ids == WHOLE[:4]


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set once a recovery pauses, for ten minutes, between two attempts."""
    begun = asyncio.Event()

    def next_s(_: RecoveryPauses) -> float:
        begun.set()
        return 600.0

    monkeypatch.setattr(RecoveryPauses, "next_s", next_s)
    return begun


async def recovering(world: Any, paused: asyncio.Event, n: int = 1) -> tuple[Any, Any]:
    """A front, and a stream of it, session `mine`, that waits for a verifier; there is none."""
    front, first, second = await two(world)
    await second.server.stop(0)
    await world.until(lambda: not front.sample("peer_up", peer=second.address))
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, session="mine", n=n, seed=7)
    await anext(stream)
    await first.server.stop(0)
    async with asyncio.timeout(60):
        await paused.wait()
    return front, stream


@pytest.mark.parametrize("n", [1, 2])
async def test_a_cancel_ends_a_request_that_waits_for_a_verifier(
    world: Any, paused: asyncio.Event, n: int
) -> None:
    front, stream = await recovering(world, paused, n)
    assert await front.client.cancel("mine")
    async with asyncio.timeout(60):
        completion = await stream.completion()
    assert len(completion.choices) == n
    for choice in completion.choices:
        assert choice.finish_reason is FinishReason.CANCELLED
        assert choice.ids == WHOLE[: len(choice.ids)]
        assert (choice.usage.prompt_tokens, choice.usage.completion_tokens) == (1, len(choice.ids))
        assert (choice.usage.recoveries, choice.usage.replay_identical) == (0, False)


async def test_a_later_request_ends_one_that_waits_for_a_verifier(world: Any, paused: asyncio.Event) -> None:
    front, stream = await recovering(world, paused)
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await front.client.generate(ids=[5], max_tokens=4, session="mine")
        with pytest.raises(Superseded):
            await stream.completion()


async def asked(front: Any, **start: Any) -> list[Any]:
    """All responses to a request, as messages of the wire."""
    async with open_channel(front.address) as channel:
        call = GenerationStub(channel).Generate()
        message = generation_pb2.GenerateStart(ids=generation_pb2.TokenIds(ids=[5]), **start)
        await call.write(generation_pb2.GenerateRequest(start=message))
        await call.done_writing()
        return [response async for response in call]


def by_hash(count: int) -> generation_pb2.TokenIds:
    """A count and a hash of ids that no store has."""
    return generation_pb2.TokenIds(count=count, prefix_hash=9)


def have(*counts: int) -> list[Any]:
    return [generation_pb2.TokenIds(ids=WHOLE[:count]) for count in counts]


async def test_a_client_goes_on_from_what_it_has_through_any_orchestrator(world: Any) -> None:
    front, first, second = await two(world)
    other = await world.ready(await world.front([first.address, second.address]))
    asks: dict[str, Any] = {"session": "mine", "seed": 7, "max_tokens": LIMIT - 1}
    started = (await asked(front, **asks | {"max_tokens": 3}))[0].started
    again = await asked(other, **asks, have=have(10), seen_epoch=started.epoch)
    assert again[0].started.epoch > started.epoch
    assert again[1].tokens.position == 11
    assert tuple(id_ for one in again for id_ in one.tokens.ids) == WHOLE[10:]


async def test_choices_go_on_each_from_its_own_place(world: Any) -> None:
    front, _, _ = await two(world)
    responses = await asked(front, session="mine", seed=7, n=2, max_tokens=LIMIT - 1, have=have(4, 50))
    got: dict[int, list[int]] = {0: [], 1: []}
    for response in responses:
        got[response.tokens.choice] += response.tokens.ids
    assert (tuple(got[0]), tuple(got[1])) == (WHOLE[4:], WHOLE[50:])


async def test_a_choice_whose_end_the_client_has_is_not_gone_on_with(world: Any) -> None:
    front, first, second = await two(world)
    named: dict[str, Any] = {"session": "mine", "seed": 7, "n": 3, "max_tokens": LIMIT - 1}
    responses = await asked(front, **named, have=[*have(0), by_hash(9), *have(50)], ended=[1, 0])
    got = [id_ for response in responses for id_ in response.tokens.ids]
    assert tuple(got) == WHOLE[50:]
    assert [one.finished.choice for one in responses if one.HasField("finished")] == [2]
    assert [message.key.choice for message in first.opened + second.opened] == [2]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"have": have(2), "seed": 1, "session": "mine", "ended": [0]}, "has the whole answer"),
    ({"have": have(2, 2), "seed": 1, "session": "mine", "n": 2, "ended": [2]}, "choices 0 to 1"),
    ({"n": 2, "ended": [0]}, "without `have`"),
    ({"have": [by_hash(4)] * 17, "seed": 1, "session": "mine"}, "have has 17 entries"),
    ({"have": have(2), "seed": 1, "session": "mine", "ended": [0] * 17}, "ended has 17 entries"),
    ({"have": have(2), "session": "mine"}, "seed"),
    ({"have": have(2), "seed": 1}, "session"),
    ({"have": have(2), "seed": 1, "session": "mine", "n": 2}, "one is needed for each of 2"),
    ({"have": have(5), "seed": 1, "session": "mine", "max_tokens": 4}, "more than max_tokens, 4"),
    ({"have": [generation_pb2.TokenIds(ids=[96])], "seed": 1, "session": "mine"}, "below 96"),
    ({"seen_epoch": 3}, "without `have`"),
]


async def test_what_a_client_says_it_has_is_checked(world: Any) -> None:
    front, _, _ = await two(world)
    for start, says in WRONG:
        with pytest.raises(AioRpcError, match=says):
            await asked(front, **start)


async def leave_early(front: Any, **start: Any) -> None:
    """A client that goes away once its request has started."""
    async with open_channel(front.address) as channel:
        call = GenerationStub(channel).Generate()
        message = generation_pb2.GenerateStart(ids=generation_pb2.TokenIds(ids=[5]), **start)
        await call.write(generation_pb2.GenerateRequest(start=message))
        await call.read()
        call.cancel()


async def test_a_resumable_request_is_let_go_and_any_other_is_cancelled(world: Any) -> None:
    front, first, _ = await two(world)
    await leave_early(front, session="stays", resumable=True)
    await leave_early(front, session="goes")
    await world.until(lambda: first.cancelled)
    assert {key.session for key, _ in first.cancelled} == {"goes"}


async def test_a_let_go_session_is_opened_where_it_was(world: Any) -> None:
    front, first, second = await two(world)
    busy = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(busy)
    assert first.opened
    await leave_early(front, session="mine", seed=1, resumable=True)
    assert [opened.key.session for opened in second.opened] == ["mine"]
    await busy.completion()
    await asked(front, session="mine", seed=1, have=have(0), max_tokens=4)
    assert [opened.key.session for opened in second.opened] == ["mine", "mine"]


@pytest.mark.parametrize("same", [True, False])
async def test_only_verifiers_of_one_numerics_promise_a_replay(world: Any, same: bool) -> None:
    front, first, second = await two(world)
    assert (await front.client.generate(ids=[5], max_tokens=4)).usage.replay_identical
    if not same:
        await second.server.stop(0)
        await world.until(lambda: not front.sample("peer_up", peer=second.address))
        second.numerics = "another"
        await world.serve(second)
        await world.until(lambda: front.sample("peer_up", peer=second.address))
    first.opened.clear()
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    lost = first if first.opened else second
    await lost.server.stop(0)
    completion = await stream.completion()
    assert completion.usage.recoveries == 1
    assert completion.usage.replay_identical is same
