"""The drafter's DraftSource service: streams in, the engine's thread behind, streams out.

The event loop only moves messages; every decision is the engine's.
"""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable

import grpc.aio

from drafter_service.drafters import Drafter
from drafter_service.engine import Engine
from drafter_service.metrics import EngineCollector
from drafter_service.settings import DrafterSettings
from outrider.runtime.metrics import Metrics
from outrider.runtime.tracing import Tracing
from outrider.source.streams import AttachStreams, Context, Requests
from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.status import guarded
from outrider.wire.workers import CONTRACT, WorkerState
from speculative.errors import Unavailable

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""How long one thread may keep the interpreter from another; the default, 5 ms, is longer than a pass."""


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
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._load = load
        self._fail = fail
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        dropped = metrics.counter("nodes_unread", "Nodes dropped because a verifier did not read them.")
        self._streams = AttachStreams(dropped.inc, tracing)
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
            self._streams.publish,
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
        self._streams.close()
        if self._engine is not None and self._thread is not None:
            self._engine.stop()
            await asyncio.to_thread(self._thread.join, grace)

    def state(self) -> WorkerState:
        """As it is announced."""
        engine = self._ready()
        return WorkerState(
            model=engine.drafter.model,
            tokenizer_digest=engine.drafter.tokenizer_digest,
            numerics=f"{self._settings.device} {self._settings.dtype}",
            capacity=self._settings.max_sessions,
            sessions=len(engine.roster),
            step_s=engine.pass_s,
        )

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
            contract=CONTRACT,
            max_sessions=self._settings.max_sessions,
        )

    @guarded
    async def Attach(
        self, request_iterator: Requests, context: Context
    ) -> AsyncIterator[draft_source_pb2.AttachResponse]:
        """One verifier's stream. UNAVAILABLE while the model loads."""
        engine = self._ready()
        drafter = engine.drafter
        responses = self._streams.attach(
            request_iterator,
            context,
            engine.submit,
            model=drafter.model,
            tokenizer_digest=drafter.tokenizer_digest,
        )
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

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
