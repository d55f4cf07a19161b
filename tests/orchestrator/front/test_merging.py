"""The streams of one body come as one, and leave the loop to others."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

from orchestrator.front.http.completion_service import BEGUN_AT_ONCE, merge_streams


async def test_streams_of_one_body_begin_a_few_at_a_time() -> None:
    turn = 0
    begun: list[int] = []

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def stream(number: int) -> AsyncGenerator[int, None]:
        begun.append(turn)
        yield number

    ticking = asyncio.create_task(others())
    items = [item async for item in merge_streams([stream(number) for number in range(64)])]
    ticking.cancel()
    assert sorted(items) == [(number, number) for number in range(64)]
    assert max(Counter(begun).values()) <= BEGUN_AT_ONCE


async def test_a_body_that_is_left_while_its_streams_begin_leaves_no_task() -> None:
    before = asyncio.all_tasks()

    async def endless() -> AsyncGenerator[int, None]:
        await asyncio.sleep(3600)
        yield 0

    async def read() -> None:
        async for _ in merge_streams([endless() for _ in range(64)]):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert asyncio.all_tasks() == before
