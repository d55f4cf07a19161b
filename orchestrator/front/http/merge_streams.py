"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


class _End:
    """A stream has no more."""


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all streams as they come, with the place of theirs. The first error ends all of them, and so
    does closing it."""
    queue: asyncio.Queue[tuple[int, Item | _End | Exception]] = asyncio.Queue(len(streams))

    async def pump(place: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((place, item))
        except Exception as error:
            await queue.put((place, error))
        else:
            await queue.put((place, _End()))

    pumps = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    left = len(pumps)
    try:
        while left:
            place, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                left -= 1
            else:
                yield place, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
