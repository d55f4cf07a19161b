"""A refusal waits for the request that it answers, unless too many others wait."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from orchestrator.front.grpc import MOST_DELAYED, RefusalDelay


class Requests:
    """The requests of one call, none of which ever comes; counts how often they are asked for."""

    asked = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        Requests.asked += 1
        await asyncio.Event().wait()


async def test_only_so_many_refusals_wait_at_a_time() -> None:
    delay, Requests.asked = RefusalDelay(), 0
    waits = [asyncio.create_task(delay.wait(Requests())) for _ in range(4 * MOST_DELAYED)]
    await asyncio.sleep(0)
    assert Requests.asked == MOST_DELAYED
    assert sum(wait.done() for wait in waits) == 3 * MOST_DELAYED
    await asyncio.gather(*waits)
    await delay.wait(Requests())
    assert Requests.asked == MOST_DELAYED + 1
