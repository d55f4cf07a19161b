"""Verifiers that die, freeze, forget or fail: a request ends in its tokens or in an error that says why."""

import asyncio
import logging
from typing import Any

import pytest

from outrider.v1 import verifier_pb2
from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError, Unavailable
from tests.in_time import in_time

QUICK = {"silent_s": 0.6, "stalled_s": 1.5, "recover_s": 0.1}


async def test_nobody_there_is_unavailable_at_once(world: Any) -> None:
    front = await world.front(["127.0.0.1:1"])
    with pytest.raises(Unavailable, match=r"no verifier can be reached; try again$"):
        await front.client.generate(ids=[5])


async def test_a_verifier_that_dies_ends_its_requests_and_the_next_one_is_refused(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address], **QUICK))
    stream = front.client.stream(ids=[5], max_tokens=60)
    await anext(stream)
    await verifier.server.stop(0)
    with pytest.raises(Unavailable, match="the request lost its verifier; since then: no verifier") as lost:
        async with asyncio.timeout(30):
            await stream.completion()
    assert "127.0.0.1" not in str(lost.value), "where verifiers are is none of a client's business"
    with pytest.raises(Unavailable, match="can be reached"):
        await front.client.generate(ids=[5])
    assert await front.client.models() == []


async def test_a_request_that_the_last_verifier_does_not_take_names_the_model_and_the_log_the_reason(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address], **QUICK))
    reason = f"Stream removed (ping timeout of ipv4:{verifier.address})"
    verifier.refusal = Unavailable(reason)
    caplog.set_level(logging.INFO)
    with pytest.raises(Unavailable) as refused:
        await front.client.generate(ids=[5])
    assert str(refused.value) == "no verifier of model 'toy' takes the request now; retry"
    told = [getattr(record, "fields", {}) for record in caplog.records if record.message == "not opened"]
    assert told == [{"peer": verifier.address, "why": reason}]


async def test_a_verifier_that_comes_back_is_used_again(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address], **QUICK))
    await verifier.server.stop(0)
    await world.until(lambda: not front.sample("peer_up", peer=verifier.address))
    verifier.sessions.clear()
    await world.serve(verifier)
    await world.ready(front)
    assert len((await front.client.generate(ids=[5], max_tokens=3)).ids) == 3


async def test_a_stream_that_breaks_goes_on_where_it_was(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], max_tokens=50)
    await anext(stream)
    await verifier.server.stop(0)
    await world.serve(verifier)
    completion = await stream.completion()
    assert completion.ids == tuple(2 + (position * 7) % 94 for position in range(1, 51))
    assert front.sample("peer_watch_broken_total", peer=verifier.address) == 1


async def test_a_verifier_that_was_started_anew_goes_on_with_what_it_has_forgotten(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], max_tokens=60)
    await anext(stream)
    await verifier.server.stop(0)
    verifier.sessions.clear()
    await world.serve(verifier)
    assert (await stream.completion()).ids == tuple(2 + (position * 7) % 94 for position in range(1, 61))


async def test_a_frozen_verifier_is_given_up(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address], **QUICK))
    stream = front.client.stream(ids=[5], max_tokens=60)
    await anext(stream)
    verifier.silent, verifier.answers = True, False
    with pytest.raises(Unavailable, match="lost its verifier"):
        await stream.completion()
    (lost,) = [record for record in caplog.records if record.message == "session lost its verifier"]
    assert "no sign of life" in vars(lost)["fields"]["why"]


async def test_a_long_step_is_waited_for_while_the_process_answers(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address], silent_s=0.6))
    stream = front.client.stream(ids=[5], max_tokens=20)
    await anext(stream)
    verifier.silent = True
    await asyncio.sleep(1.2)
    verifier.silent = False
    assert len((await stream.completion()).ids) == 20


async def test_an_engine_that_never_steps_again_is_given_up_too(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address], **QUICK))
    stream = front.client.stream(ids=[5], max_tokens=60)
    await anext(stream)
    verifier.silent = True
    with pytest.raises(Unavailable):
        await stream.completion()


async def test_a_session_that_failed_over_there_says_why(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], session="mine")
    await world.until(lambda: verifier.sessions)
    verifier.fault = verifier_pb2.Committed(position=1, finished=4, message="NaN at position 1", code=13)
    with pytest.raises(OutriderError, match="NaN at position 1"):
        await stream.completion()
    await world.until(lambda: front.sample("request_success_total", finished_reason="error") == 1)


async def test_ids_that_do_not_join_are_an_internal_error_not_a_wrong_answer(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], session="mine")
    await world.until(lambda: verifier.sessions)
    verifier.fault = verifier_pb2.Committed(position=9, ids=[3], token_sources=b"\0")
    with pytest.raises(OutriderError, match="INTERNAL"):
        await stream.completion()
    await world.until(lambda: (SessionKey("default", "mine"), verifier.highest) in verifier.cancelled)


async def test_an_orchestrator_that_stops_says_so_to_its_clients(world: Any) -> None:
    verifier = await world.verifier(per_tick=0)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5])
    await world.until(lambda: verifier.sessions)
    stopping = asyncio.create_task(front.service.stop(0.1))
    with pytest.raises(Unavailable, match="stopping"):
        await stream.completion()
    await stopping
    in_time(verifier.cancelled, "the stop waits a moment for Cancels to leave")


async def test_a_cancel_that_reaches_no_verifier_does_not_say_where_that_one_is(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.ready(await world.front([verifier.address], recover_s=30))
    stream = front.client.stream(ids=[5], session="mine", max_tokens=60)
    await anext(stream)
    await verifier.server.stop(0)
    with pytest.raises(Unavailable, match="the session's verifier cannot be reached; try again") as refused:
        await front.client.cancel("mine")
    assert "127.0.0.1" not in str(refused.value)
