"""Workers that are about to end: their sessions go elsewhere, and clients notice nothing."""

import asyncio
import time
from typing import Any

import pytest

from orchestrator.store.ledger import Ledger
from outrider.wire.codec import SessionKey
from outrider.wire.workers import WorkerEntry, WorkerState
from speculative.errors import OutriderError
from tests.in_time import in_time
from tests.orchestrator.fleet.test_registry import ANY, announce

LIMIT = 60
WHOLE = tuple(2 + (position * 7) % 94 for position in range(1, LIMIT))


async def two(world: Any, **settings: Any) -> tuple[Any, Any, Any]:
    """A front, the verifier that its next request goes to, and the other one."""
    first = await world.verifier(per_tick=1, tick_s=0.02)
    second = await world.verifier(per_tick=1, tick_s=0.02)
    front = await world.front([first.address, second.address], **settings)
    for one in (first, second):
        await world.until(lambda one=one: front.sample("peer_up", peer=one.address))
    return await world.ready(front), first, second


@pytest.mark.parametrize("n", [1, 3])
async def test_a_draining_verifier_s_sessions_are_taken_over_while_it_still_works(world: Any, n: int) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, n=n, seed=7)
    await anext(stream)
    first.draining = True
    await world.until(lambda: len(second.opened) == n)
    completion = await stream.completion()
    assert {choice.ids for choice in completion.choices} == {WHOLE}
    for choice in completion.choices:
        assert choice.usage.completion_tokens == LIMIT - 1
        assert choice.usage.recoveries == 1
    assert {opened.recovered for opened in second.opened} == {True}
    assert min(it.epoch for it in second.opened) > max(it.epoch for it in first.opened)
    await world.until(lambda: len(first.cancelled) == n)
    assert front.sample("peer_draining", peer=first.address) == 1


async def test_a_request_that_moves_twice_leaves_no_watch_for_cancels_behind(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = []

    async def endless(ledger: Ledger, key: SessionKey, epoch: int) -> bool:
        watches.append(asyncio.current_task())
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(Ledger, "was_cancelled_meanwhile", endless)
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    first.draining = True
    await world.until(lambda: second.opened)
    first.draining = False
    await world.until(lambda: not front.sample("peer_draining", peer=first.address))
    second.draining = True
    await world.until(lambda: len(first.opened) == 2)
    assert (await stream.completion()).usage.recoveries == 2
    assert len(watches) == 2
    await world.until(lambda: all(task.done() for task in watches if task is not None))


async def test_it_gets_no_new_session(world: Any) -> None:
    front, first, second = await two(world)
    first.draining = True
    await world.until(lambda: front.sample("peer_draining", peer=first.address))
    for _ in range(3):
        await front.client.generate(ids=[5], max_tokens=3)
    assert (len(first.opened), len(second.opened)) == (0, 3)


async def test_without_another_one_it_goes_on_to_the_end(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    await second.server.stop(0)
    await world.until(lambda: not front.sample("peer_up", peer=second.address))
    first.draining = True
    completion = await stream.completion()
    assert completion.ids == WHOLE
    assert completion.usage.recoveries == 0


async def test_one_that_does_not_take_it_costs_no_token_and_one_that_comes_later_does(world: Any) -> None:
    front, first, second = await two(world)
    first.tick_s = 0.05
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    second.refusal = OutriderError("out of order")
    first.draining = True
    await asyncio.sleep(0.7)
    assert not second.opened
    second.refusal = None
    completion = await stream.completion()
    assert completion.ids == WHOLE
    assert completion.usage.recoveries == 1
    assert completion.usage.completion_tokens == LIMIT - 1


async def test_a_cancel_while_it_moves_ends_it(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, session="mine")
    await anext(stream)
    first.draining = True
    await world.until(lambda: second.opened)
    await front.client.cancel("mine")
    completion = await stream.completion()
    assert completion.finish_reason == "cancelled"


async def test_the_handle_leads_to_the_verifier_that_took_over(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=40, session="mine")
    await anext(stream)
    first.draining = True
    whole = (await stream.completion()).ids
    await world.until(lambda: not front.service._ledger.waiting)  # it is written down
    first.draining = False
    await world.until(lambda: not front.sample("peer_draining", peer=first.address))
    await front.client.generate(ids=[5, *whole], max_tokens=4, session="mine")
    assert [len(one.opened) for one in (first, second)] == [1, 2]


async def test_the_pause_is_short(world: Any) -> None:
    front, first, second = await two(world)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    first.draining = True
    longest, last = 0.0, time.monotonic()
    async for _ in stream:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    assert second.opened
    in_time(longest < 0.5, "nobody waits for silence")
    assert front.sample("recovery_seconds_count") == 1


async def test_a_session_whose_drafter_is_gone_gets_another_one(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.fleet.source_probe.ASK_KNOWN_S", 0.1)
    verifier = await world.verifier(per_tick=1, tick_s=0.03)
    drafters = [await world.source() for _ in range(2)]
    front = await world.ready(await world.front([verifier.address], tuple(drafters)), sources=2)
    for address in drafters:
        await world.until(lambda address=address: front.sample("peer_up", peer=address))
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1)
    await anext(stream)
    (had,) = {source.address for source in verifier.opened[0].sources if source.address}
    await world.source_servers[had].stop(0)
    await world.until(lambda: verifier.changed)
    (message,) = verifier.changed
    assert {it.address for it in message.sources} == {"", *drafters} - {had}
    assert tuple(message.ids)[:1] == (5,)
    assert (await stream.completion()).ids == WHOLE


async def test_sessions_leave_a_drafter_that_drains_within_the_same_request(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.03)
    drafters = [await world.source() for _ in range(2)]
    front = await world.front([verifier.address], registry_bind=ANY)
    entries = [WorkerEntry("drafter", address, WorkerState(capacity=8)) for address in drafters]
    for entry in entries:
        await announce(front.registry, entry)
        await world.until(lambda entry=entry: front.sample("peer_up", peer=entry.address))
    await world.ready(front, sources=2)
    stream = front.client.stream(ids=[5], max_tokens=LIMIT - 1, n=2)
    await anext(stream)
    (had,) = {source.address for source in verifier.opened[0].sources if source.address}
    (other,) = set(drafters) - {had}
    await announce(front.registry, WorkerEntry("drafter", had, WorkerState(capacity=8), draining=True))
    await world.until(lambda: len(verifier.changed) == 2)
    assert front.sample("peer_sessions", peer=had) == 0
    assert front.sample("peer_sessions", peer=other) == 2
    completion = await stream.completion()
    assert {choice.ids for choice in completion.choices} == {WHOLE}
    for message, before in zip(verifier.changed, verifier.opened, strict=True):
        assert message.epoch == before.epoch
        assert [it.name for it in message.sources] == [it.name for it in before.sources]
        assert {it.address for it in message.sources} == {"", other}
    await world.until(lambda: not front.sample("peer_sessions", peer=other))
