"""The drafter's DraftSource service: streams in, the engine's thread behind, streams out.

The event loop only moves messages; every decision is the engine's, or `messages`' where a message is wrong in
itself.
"""

import asyncio
import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from drafter_service.drafters import Drafter
from drafter_service.engine import Broken, Engine, Outgoing
from drafter_service.messages import events_from_wire, outgoing_to_wire
from drafter_service.metrics import EngineCollector
from drafter_service.outbox import Outbox
from drafter_service.settings import DrafterSettings
from outrider.runtime.metrics import Metrics
from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.status import guarded
from speculative.errors import Unavailable

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""How long one thread may keep the interpreter from another; the default, 5 ms, is longer than a pass."""

Requests = AsyncIterator[draft_source_pb2.AttachRequest]
Context = grpc.aio.ServicerContext[Any, Any]


class DraftSourceServer(draft_source_pb2_grpc.DraftSourceServicer):
    """A `Service` of `outrider.runtime`.

    Args:
        load: makes the drafter, in a thread of its own; raises OutriderError where it cannot be had.
        fail: told what ended the engine's thread.
    """

    def __init__(
        self,
        settings: DrafterSettings,
        load: Callable[[], Drafter],
        metrics: Metrics,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._load = load
        self._fail = fail
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._streams = itertools.count()
        self._outboxes: dict[int, Outbox] = {}
        self._dropped = metrics.counter("nodes_unread", "Nodes dropped because a verifier did not read them.")
        metrics.registry.register(EngineCollector(lambda: self._engine))

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds the servicer; returns its name."""
        draft_source_pb2_grpc.add_DraftSourceServicer_to_server(self, server)
        return (draft_source_pb2.DESCRIPTOR.services_by_name["DraftSource"].full_name,)

    async def start(self) -> None:
        """Loads the model and starts the engine."""
        drafter = await asyncio.to_thread(self._load)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settings = self._settings
        self._engine = Engine(
            drafter,
            self._publish,
            growth=settings.growth,
            nodes_per_pass=settings.nodes_per_pass,
            chunk=settings.prefill_chunk,
            grace_s=settings.keep_s,
            max_sessions=settings.max_sessions,
        )
        self._thread = threading.Thread(target=self._run, args=(self._engine,), name="engine", daemon=True)
        self._thread.start()

    async def stop(self, grace: float) -> None:
        """Ends held streams and the engine."""
        for outbox in self._outboxes.values():
            outbox.close()
        if self._engine is not None and self._thread is not None:
            self._engine.stop()
            await asyncio.to_thread(self._thread.join, grace)

    @guarded
    async def Describe(
        self, request: draft_source_pb2.SourceDescribeRequest, context: Context
    ) -> draft_source_pb2.SourceDescription:
        """What this drafter can follow. UNAVAILABLE while it loads."""
        drafter = self._ready().drafter
        return draft_source_pb2.SourceDescription(
            name=self._settings.name,
            model=drafter.model,
            tokenizer_digest=drafter.tokenizer_digest,
            vocabulary_size=drafter.abilities.bound,
            max_length=drafter.abilities.max_length,
        )

    @guarded
    async def Attach(
        self, request_iterator: Requests, context: Context
    ) -> AsyncIterator[draft_source_pb2.AttachResponse]:
        """One verifier's stream. UNAVAILABLE while the model loads."""
        engine = self._ready()
        stream = next(self._streams)
        outbox = self._outboxes[stream] = Outbox()
        reader = asyncio.create_task(self._read(request_iterator, engine, stream, outbox))
        log.info("stream opened", extra={"fields": {"peer": context.peer(), "stream": stream}})
        try:
            while (outgoing := await outbox.take()) is not None:
                yield outgoing_to_wire(outgoing)
        finally:
            del self._outboxes[stream]
            engine.submit(Broken(stream))
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            log.info("stream closed", extra={"fields": {"stream": stream}})

    async def _read(self, requests: Requests, engine: Engine, stream: int, outbox: Outbox) -> None:
        drafter = engine.drafter
        try:
            async for message in requests:
                events = events_from_wire(
                    message, stream, model=drafter.model, tokenizer_digest=drafter.tokenizer_digest
                )
                for event in events:
                    engine.submit(event)
        finally:
            outbox.close()

    def _publish(self, outgoing: dict[int, Outgoing]) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._put, outgoing)

    def _put(self, outgoing: dict[int, Outgoing]) -> None:
        for stream, what in outgoing.items():
            outbox = self._outboxes.get(stream)
            if outbox is not None:
                self._dropped.inc(outbox.put(what))

    def _run(self, engine: Engine) -> None:
        try:
            engine.run()
        except BaseException as error:
            log.exception("the engine ended")
            self._fail(error)

    def _ready(self) -> Engine:
        if self._engine is None:
            raise Unavailable("the drafter is loading its model")
        return self._engine
