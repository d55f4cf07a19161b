"""Requests of several tenants begin a few at a time, and nobody waits for nobody's sake."""

import asyncio
import itertools
import random
from typing import Any

import pytest

from orchestrator.relay.opening_turns import LEAST_AT_ONCE, MOST_AT_ONCE, QUICK_S, OpeningTurns, Turn
from speculative.errors import Superseded
from speculative.stop import FinishReason
from tests.orchestrator.conftest import FakeVerifier, next_id


class Begun:
    """Enters requests, and records which of them have begun. Every look at the clock takes a second."""

    def __init__(self, at_once: int) -> None:
        self.verifiers = 1
        self.clock = itertools.count()
        self.turns = OpeningTurns(lambda: self.verifiers, lambda: float(next(self.clock)), at_once)
        self.begun: list[str] = []

    def enter(self, tenant: str, name: str, choices: int = 1) -> Turn:
        """Enters one request."""
        return self.turns.enter(tenant, choices, lambda: self.begun.append(name))


def test_a_tenant_alone_never_waits() -> None:
    at = Begun(2)
    for number in range(100):
        at.enter("a", str(number))
    assert at.begun == [str(number) for number in range(100)]


def test_beside_another_tenant_a_burst_begins_a_few_at_a_time_in_its_order() -> None:
    at = Begun(2)
    quiet = at.enter("b", "quiet")
    burst = [at.enter("a", str(number)) for number in range(5)]
    assert at.begun == ["quiet", "0", "1"]
    burst[0].opened()
    burst[0].opened()  # further tokens
    assert at.begun == ["quiet", "0", "1", "2"]
    burst[0].leave()
    burst[1].leave()
    assert at.begun == ["quiet", "0", "1", "2", "3"]
    assert quiet.opening


def test_the_more_verifiers_there_are_the_more_requests_begin_at_a_time() -> None:
    at = Begun(2)
    at.verifiers = 3
    at.enter("b", "quiet")
    burst = [at.enter("a", str(number)) for number in range(9)]
    assert at.begun == ["quiet", *map(str, range(6))]
    at.verifiers = 0
    for turn in burst[:4]:
        turn.opened()
    assert len(at.begun) == 7, "two of them are opening, as beside one verifier"
    for turn in burst[4:6]:
        turn.opened()
    assert len(at.begun) == 9


def test_the_sooner_first_tokens_come_the_more_requests_begin_at_a_time() -> None:
    clock, begun = [0.0], list[Turn]()
    turns = OpeningTurns(lambda: 1, lambda: clock[0])
    turns.enter("b", 1, lambda: None)

    def opening(count: int, took_s: float) -> int:
        """The most requests that were opening at a time, of so many that each took `took_s`."""
        waiting, most = [turns.enter("a", 1, lambda: None) for _ in range(count)], 0
        while waiting:
            begun[:] = [turn for turn in waiting if turn.opening]
            most = max(most, len(begun))
            clock[0] += took_s
            for turn in begun:
                turn.opened()
                turn.leave()
                waiting.remove(turn)
        return most

    assert opening(200, took_s=2 * QUICK_S) == MOST_AT_ONCE // 2
    assert opening(200, took_s=QUICK_S / 2) == MOST_AT_ONCE
    opening(100, took_s=1.0)
    assert opening(20, took_s=1.0) == LEAST_AT_ONCE


def test_the_other_tenant_begins_at_once_amid_the_burst() -> None:
    at = Begun(1)
    at.enter("b", "b0")
    for number in range(3):
        at.enter("a", f"a{number}")
    at.enter("c", "c0")
    assert at.begun == ["b0", "a0", "c0"]


def test_a_request_of_more_choices_than_may_begin_at_once_begins_alone() -> None:
    at = Begun(2)
    at.enter("b", "quiet")
    wide = at.enter("a", "wide", choices=16)
    behind = at.enter("a", "behind")
    assert at.begun == ["quiet", "wide"]
    wide.opened()
    assert at.begun[-1] == "behind"
    assert behind.opening


def test_all_begin_once_the_other_tenant_has_left() -> None:
    at = Begun(1)
    quiet = at.enter("b", "quiet")
    for number in range(4):
        at.enter("a", str(number))
    assert at.begun == ["quiet", "0"]
    quiet.leave()
    assert at.begun == ["quiet", "0", "1", "2", "3"]


def test_a_request_that_leaves_before_its_turn_never_begins_and_holds_nobody_up() -> None:
    at = Begun(1)
    at.enter("b", "quiet")
    first, second, third = (at.enter("a", str(number)) for number in range(3))
    second.leave()
    first.leave()
    assert at.begun == ["quiet", "0", "2"]
    assert third.opening


def test_every_request_begins_whatever_the_order_of_events() -> None:
    draw = random.Random(1)
    for _ in range(200):
        at, inside = Begun(draw.randrange(1, 4)), dict[str, Turn]()
        for number in range(30):
            inside[str(number)] = at.enter(draw.choice("abc"), str(number), draw.randrange(1, 6))
            inside[draw.choice(at.begun)].opened()
        gone = set[str]()
        while ready := sorted(set(at.begun) - gone):
            name = draw.choice(ready)
            inside[name].leave()
            gone.add(name)
        assert gone == set(inside)


async def test_a_burst_is_opened_a_few_at_a_time_beside_another_tenant(world: Any) -> None:
    verifier = FakeVerifier(per_tick=0)
    await world.serve(verifier)
    front = await world.ready(await world.front([verifier.address]))

    def ask(tenant: str, session: str) -> asyncio.Future[Any]:
        request = front.client.generate(ids=[5], tenant=tenant, session=session, max_tokens=4)
        return asyncio.ensure_future(request)

    quiet = ask("quiet", "quiet")
    await world.until(lambda: len(verifier.opened) == 1)
    burst = [ask("burst", f"s-{number}") for number in range(LEAST_AT_ONCE + 4)]
    await world.until(lambda: len(verifier.opened) == 1 + LEAST_AT_ONCE)
    await asyncio.sleep(0.05)
    assert len(verifier.opened) == 1 + LEAST_AT_ONCE
    waiting = {f"s-{number}" for number in range(LEAST_AT_ONCE + 4)} - {
        it.key.session for it in verifier.opened
    }
    again = ask("burst", superseded := min(waiting))
    with pytest.raises(Superseded):
        await burst[int(superseded.removeprefix("s-"))]
    cancelled = max(waiting)
    assert await front.client.cancel(cancelled, tenant="burst")
    async with asyncio.timeout(30):
        answer = await burst[int(cancelled.removeprefix("s-"))]
    assert answer.finish_reason is FinishReason.CANCELLED
    verifier.per_tick = 2
    for asked in (quiet, again, *(it for it in burst if not it.done())):
        assert list((await asked).ids) == [next_id(position) for position in range(1, 5)]


async def test_requests_that_begin_slowly_at_one_model_hold_up_none_at_another(world: Any) -> None:
    slow, quick = FakeVerifier(per_tick=0), FakeVerifier(model="quick")
    for verifier in (slow, quick):
        await world.serve(verifier)
    front = await world.ready(await world.front([slow.address, quick.address]), models=2)

    def ask(tenant: str, model: str) -> asyncio.Future[Any]:
        request = front.client.generate(ids=[5], tenant=tenant, model=model, max_tokens=4)
        return asyncio.ensure_future(request)

    stuck = [ask("burst", slow.model) for _ in range(LEAST_AT_ONCE)]
    stuck += [ask("quiet", slow.model), ask("quiet", "quick")]
    await world.until(lambda: len(slow.opened) == 1 + LEAST_AT_ONCE)
    async with asyncio.timeout(30):
        assert list((await ask("burst", "quick")).ids) == [next_id(position) for position in range(1, 5)]
    slow.per_tick = 2
    await asyncio.gather(*stuck)
