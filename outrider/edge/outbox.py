"""Messages on their way to the server: what gRPC reads as a request's stream, blocking and for asyncio."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from outrider.v1 import generation_pb2

Message = generation_pb2.GenerateRequest
Given = TypeVar("Given")


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[[Given], object], given: Given) -> None:
    """Has an event loop call a function soon; from any thread, also where the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, given)


class Outbox(Iterator[Message]):
    """Yields the messages that were put, until it is closed; gRPC reads it in a thread of its own."""

    def __init__(self, first: Message) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._messages.put(first)

    def put(self, message: Message) -> None:
        """Adds a message, without waiting; from any thread."""
        self._messages.put(message)

    def close(self) -> None:
        """Ends the stream behind the messages that were put."""
        self._messages.put(None)

    def __next__(self) -> Message:
        message = self._messages.get()
        if message is None:
            self._messages.put(None)  # for a reader that asks again
            raise StopIteration
        return message


class AsyncOutbox(AsyncIterator[Message]):
    """An outbox inside one event loop; `put` and `close` are for any thread."""

    def __init__(self, first: Message) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._messages.put_nowait(first)

    def put(self, message: Message) -> None:
        """Adds a message, without waiting."""
        call_in(self._loop, self._messages.put_nowait, message)

    def close(self) -> None:
        """Ends the stream behind the messages that were put."""
        call_in(self._loop, self._messages.put_nowait, None)

    async def __anext__(self) -> Message:
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)
            raise StopAsyncIteration
        return message
