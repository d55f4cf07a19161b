"""The Attach streams of one source: messages in become events, what the engine publishes becomes messages.

The event loop only moves messages; every decision is the engine's, or `messages`' where a message is wrong in
itself.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc.aio

from outrider.runtime.tracing import Tracing
from outrider.source.events import Broken, Event, Outgoing
from outrider.source.messages import events_from_wire, outgoing_to_wire
from outrider.source.outbox import Outbox
from outrider.source.spans import FollowSpans
from outrider.v1 import draft_source_pb2

log = logging.getLogger(__name__)

Requests = AsyncIterator[draft_source_pb2.AttachRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class AttachStreams:
    """Belongs to the event loop that makes it; only `publish` may be called from elsewhere.

    Args:
        dropped: told of nodes that went because a verifier did not read them.
        tracing: of the sessions that are followed.
    """

    def __init__(self, dropped: Callable[[int], None], tracing: Tracing | None = None) -> None:
        self._dropped = dropped
        self._spans = FollowSpans(tracing or Tracing())
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._outboxes: dict[int, Outbox] = {}

    async def attach(
        self,
        requests: Requests,
        context: Context,
        submit: Callable[[Event], None],
        *,
        model: str,
        tokenizer_digest: str,
    ) -> AsyncGenerator[draft_source_pb2.AttachResponse, None]:
        """One verifier's stream, until either side ends it; the source is of this model and tokenizer."""
        stream = next(self._numbers)
        outbox = self._outboxes[stream] = Outbox()

        async def read() -> None:
            try:
                async for message in requests:
                    self._spans.told(stream, message)
                    for event in events_from_wire(
                        message, stream, model=model, tokenizer_digest=tokenizer_digest
                    ):
                        submit(event)
            finally:
                outbox.close()

        reader = asyncio.create_task(read())
        log.info("stream opened", extra={"fields": {"peer": context.peer(), "stream": stream}})
        try:
            while (outgoing := await outbox.take()) is not None:
                yield outgoing_to_wire(outgoing)
        finally:
            del self._outboxes[stream]
            submit(Broken(stream))
            self._spans.broken(stream)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            log.info("stream closed", extra={"fields": {"stream": stream}})

    def publish(self, outgoing: dict[int, Outgoing]) -> None:
        """Called by the engine's thread: what goes out, by stream."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._put, outgoing)

    def close(self) -> None:
        """Ends every stream."""
        for outbox in self._outboxes.values():
            outbox.close()

    def _put(self, outgoing: dict[int, Outgoing]) -> None:
        for stream, what in outgoing.items():
            outbox = self._outboxes.get(stream)
            if outbox is not None:
                self._dropped(outbox.put(what))
                self._spans.drafted(stream, what)
