"""The streams of a client, which end when the client is closed."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar
from weakref import WeakSet

import grpc.aio

from speculative.errors import OutriderError

CLOSED = "the request was cancelled: its stream or its client was closed"


class Closable(Protocol):
    """A stream that can be closed."""

    def close(self) -> None:
        """Cancels the request."""


Stream = TypeVar("Stream", bound=Closable)


class OpenStreams:
    """The streams that a client has opened and that somebody still holds. For any thread."""

    def __init__(self) -> None:
        self._streams: WeakSet[Closable] = WeakSet()
        self._closed = False
        self._lock = threading.Lock()

    def add(self, stream: Stream) -> Stream:
        """Adds a new stream, and returns it; closed if the client was closed meanwhile."""
        with self._lock:
            self._streams.add(stream)
            closed = self._closed
        if closed:
            stream.close()
        return stream

    def close(self) -> None:
        """Closes all streams, also those that wait to ask again, and lets no more calls begin."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    @contextmanager
    def beginning_a_call(self) -> Iterator[None]:
        """Context for a call on the client's channels. Raises OutriderError once the client is closed."""
        if self._closed:
            raise OutriderError(CLOSED)
        try:
            yield
        except (ValueError, grpc.aio.UsageError) as error:  # what gRPC raises for a closed channel
            if not self._closed:
                raise
            raise OutriderError(CLOSED) from error
        except asyncio.CancelledError as error:
            # A channel that closes cancels its calls; the task that awaits the call was not cancelled itself.
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self._closed:
                raise
            raise OutriderError(CLOSED) from error
