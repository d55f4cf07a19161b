"""The Attach streams of one source: turns messages into events, and published drafts into messages.

The event loop only moves messages. The worker decides everything else, but for messages that make no sense to
any source: `messages` refuses those.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc.aio

from outrider.runtime.tracing import Tracing
from outrider.source.events import Event, Follow, Outgoing, Progress, StreamClosed
from outrider.source.messages import ATTACH_BOUNDS, events_from_wire, outgoing_to_wire
from outrider.source.spans import FollowSpans
from outrider.v1 import draft_source_pb2
from outrider.wire.incoming.unparsed import Unparsed, parsed
from speculative.errors import Unavailable
from speculative.fragment import Fragment

log = logging.getLogger(__name__)

Requests = AsyncIterator[Unparsed[draft_source_pb2.AttachRequest] | draft_source_pb2.AttachRequest]
Context = grpc.aio.ServicerContext[Any, Any]

MOST_DRAFTS = 512
MOST_REFUSALS = 4096
REFUSALS_AT_ONCE = 64
"""Refusals of one message. With MOST_DRAFTS of the largest drafts the message stays below 1 MiB."""
MOST_PENDING = 16_384
"""Events that may wait for the worker before reading pauses."""
PENDING_PAUSE_S = 0.01
WEIGHT_PER_PAUSE = 1 << 16
"""Token ids, and 64 for each event, between two pauses: some 3 ms."""


class DraftOutbox:
    """Drafts, refusals and waits that are to be sent on one stream: they become the next message.

    Bounded: a peer that does not read costs the oldest drafts, which are the likeliest to be stale, and never
    the worker's time. Belongs to the event loop.
    """

    def __init__(self, most_drafts: int = MOST_DRAFTS) -> None:
        self._drafts: deque[tuple[int, Fragment]] = deque(maxlen=most_drafts)
        self._refusals: deque[tuple[int, str]] = deque(maxlen=MOST_REFUSALS)
        self._waits: dict[int, int] = {}
        self._weights_version = 0
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, outgoing: Outgoing) -> int:
        """Adds drafts, refusals and waits; returns how many nodes were dropped to make room."""
        lost = len(self._drafts) + len(outgoing.drafts) - (self._drafts.maxlen or 0)
        dropped = 0
        if lost > 0:
            oldest = [*self._drafts, *outgoing.drafts][:lost]
            dropped = sum(len(fragment) for _, fragment in oldest)
        self._drafts.extend(outgoing.drafts)
        self._refusals.extend(outgoing.refusals)
        self._waits |= outgoing.waits
        self._weights_version = outgoing.weights_version
        self._changed.set()
        return dropped

    def close(self) -> None:
        """Makes `take` return None from now on."""
        self._closed = True
        self._changed.set()

    async def take(self) -> Outgoing | None:
        """Waits until there is something and takes it, many refusals in pieces; None after `close`."""
        while not self._closed:
            if self._drafts or self._refusals or self._waits:
                most = min(REFUSALS_AT_ONCE, len(self._refusals))
                refusals = [self._refusals.popleft() for _ in range(most)]
                taken = Outgoing(list(self._drafts), refusals, self._waits, self._weights_version)
                self._drafts.clear()
                self._waits = {}
                return taken
            self._changed.clear()
            await self._changed.wait()
        return None


class AttachStreams:
    """The open streams of one source. Belongs to the event loop that makes it; `publish` is for any thread.

    Args:
        dropped: called with the number of nodes that were dropped because a verifier did not read them.
        tracing: records a span for each followed session that is traced.
    """

    def __init__(self, dropped: Callable[[int], None], tracing: Tracing | None = None) -> None:
        self._dropped = dropped
        self._spans = FollowSpans(tracing or Tracing())
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._outboxes: dict[int, DraftOutbox] = {}
        self._closed = False

    async def attach(
        self,
        requests: Requests,
        context: Context,
        submit: Callable[[Event], None],
        *,
        pending: Callable[[], int],
        model: str,
        tokenizer_digest: str,
        max_length: int,
    ) -> AsyncGenerator[draft_source_pb2.AttachResponse, None]:
        """Serves one verifier's stream until either side ends it. Raises Unavailable once `close` was called.

        Args:
            submit: takes the events of the verifier's messages.
            pending: number of events that were not handled yet; with many of them, reading pauses.
            model: the source's model, for refusals.
            tokenizer_digest: the source's tokenizer; follows with another one are refused.
            max_length: the longest session that the source follows, in tokens.
        """
        if self._closed:  # a verifier dials again at once
            raise Unavailable("this source is stopping")
        stream = next(self._numbers)
        outbox = self._outboxes[stream] = DraftOutbox()

        async def read() -> None:
            try:
                async for request in requests:
                    message = await parsed(request, ATTACH_BOUNDS)
                    made = events_from_wire(
                        message,
                        stream,
                        model=model,
                        tokenizer_digest=tokenizer_digest,
                        max_length=max_length,
                    )
                    self._spans.received(stream, message)
                    weight = 0
                    for event in made:
                        submit(event)
                        if (weight := weight + _weight(event)) > WEIGHT_PER_PAUSE:
                            weight = 0
                            await asyncio.sleep(0)
                    while pending() > MOST_PENDING:  # noqa: ASYNC110  # the worker's thread sets no event
                        await asyncio.sleep(PENDING_PAUSE_S)
            finally:
                outbox.close()

        reader = asyncio.create_task(read())
        log.info("stream opened", extra={"fields": {"peer": context.peer(), "stream": stream}})
        try:
            while (outgoing := await outbox.take()) is not None:
                yield outgoing_to_wire(outgoing)
        finally:
            del self._outboxes[stream]
            submit(StreamClosed(stream))
            self._spans.stream_closed(stream)
            reader.cancel()
            (outcome,) = await asyncio.gather(reader, return_exceptions=True)
            if isinstance(outcome, Exception):  # what a message was refused for
                raise outcome
            log.info("stream closed", extra={"fields": {"stream": stream}})

    def publish(self, outgoing: dict[int, Outgoing]) -> None:
        """Sends drafts and refusals, by stream; for any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self.put, outgoing)

    def close(self) -> None:
        """Ends every stream; no further one is served."""
        self._closed = True
        for outbox in self._outboxes.values():
            outbox.close()

    def put(self, outgoing: dict[int, Outgoing]) -> None:
        """Sends drafts and refusals, by stream; for the loop's own thread."""
        for stream, what in outgoing.items():
            outbox = self._outboxes.get(stream)
            if outbox is not None:
                self._dropped(outbox.put(what))
                self._spans.sent(stream, what)


def _weight(event: Event) -> int:
    """What it took to make an event, in token ids."""
    match event:
        case Progress():
            return 64 + len(event.ids)
        case Follow():
            return 64 + len(event.request.ids)
    return 64
