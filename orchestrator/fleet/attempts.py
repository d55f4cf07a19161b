"""Calls under way to one peer, which end where the peer is given up: a frozen one answers when it wakes."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from speculative.errors import Unavailable

Answer = TypeVar("Answer")


class Attempts:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Future[Unavailable]] = set()

    def give_up(self, why: str) -> None:
        """None of them is waited for any longer."""
        for given_up in self._under_way:
            if not given_up.done():
                given_up.set_result(Unavailable(why))

    async def answer(self, call: Awaitable[Answer]) -> Answer:
        """What it gives. Raises what it raises, and Unavailable where the peer is given up before."""
        task = asyncio.ensure_future(call)
        given_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self._under_way.add(given_up)
        try:
            await asyncio.wait((task, given_up), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise given_up.result()
            return task.result()
        finally:
            self._under_way.discard(given_up)
            task.cancel()
