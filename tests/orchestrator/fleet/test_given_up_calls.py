"""Calls to a peer that may be given up before it answers."""

import asyncio

import pytest

from orchestrator.fleet.attempts import Attempts
from speculative.errors import StaleEpoch, Unavailable


async def later(answer: int | Exception) -> int:
    await asyncio.sleep(0.01)
    if isinstance(answer, Exception):
        raise answer
    return answer


async def test_an_answer_and_an_error_come_as_they_are() -> None:
    attempts = Attempts()
    assert await attempts.answer(later(7)) == 7
    with pytest.raises(StaleEpoch):
        await attempts.answer(later(StaleEpoch("old", 9)))
    attempts.give_up("gone")
    assert await attempts.answer(later(8)) == 8, "what begins afterwards has its own chance"


async def test_nobody_waits_for_a_peer_that_is_given_up() -> None:
    attempts, never = Attempts(), asyncio.Event()
    waiting = [asyncio.create_task(attempts.answer(never.wait())) for _ in range(2)]
    await asyncio.sleep(0)
    attempts.give_up("it is frozen")
    attempts.give_up("and again")
    for task in waiting:
        with pytest.raises(Unavailable, match="it is frozen"):
            await task


async def test_whoever_goes_away_takes_the_call_along() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("call")

    task = asyncio.create_task(Attempts().answer(endless()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert ended == ["call"]
