"""Puts the retrieval worker together from its settings, and runs it inside a process."""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable

import grpc.aio

from outrider.announcing import announced
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import Service, ServiceContext
from outrider.source.streams import AttachStreams, Context, Requests
from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc, retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.status import guarded
from outrider.wire.workers import CONTRACT, WorkerState
from retrieval_service.engine import Engine
from retrieval_service.holdings import NAMES
from retrieval_service.loading import Loaded, load
from retrieval_service.metrics import LOOKUP_SECONDS, EngineCollector
from retrieval_service.server import RetrievalServer
from retrieval_service.settings import RetrievalSettings
from speculative.errors import Unavailable

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0002
"""How long one thread may keep the interpreter from another; the default, 5 ms, is longer than a round."""
ANY_ID = 2**32 - 1


class RetrievalService(draft_source_pb2_grpc.DraftSourceServicer):
    """A `Service` of `outrider.runtime`: a source of drafts, and the Retrieval service beside it."""

    def __init__(self, context: ServiceContext[RetrievalSettings]) -> None:
        self._settings = context.settings
        self._fail = context.fail
        self._loaded: Loaded | None = None
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        metrics = context.metrics
        dropped = metrics.counter("nodes_unread", "Nodes dropped because a verifier did not read them.")
        self._streams = AttachStreams(dropped.inc, context.tracing)
        self._observe = _lookup_histogram(metrics)
        self._retrieval = RetrievalServer(context.settings, self._ready)
        metrics.registry.register(EngineCollector(lambda: self._engine))

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds the servicers; returns their names."""
        draft_source_pb2_grpc.add_DraftSourceServicer_to_server(self, server)
        retrieval_pb2_grpc.add_RetrievalServicer_to_server(self._retrieval, server)
        return (
            draft_source_pb2.DESCRIPTOR.services_by_name["DraftSource"].full_name,
            retrieval_pb2.DESCRIPTOR.services_by_name["Retrieval"].full_name,
        )

    async def start(self) -> None:
        """Maps the indexes and starts the engine."""
        settings = self._settings
        self._loaded = loaded = await asyncio.to_thread(load, settings)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._engine = Engine(
            loaded.holdings,
            self._streams.publish,
            self._observe,
            shape=settings.shape,
            grace_s=settings.keep_s,
            max_sessions=settings.max_sessions,
            max_length=settings.max_length,
        )
        self._thread = threading.Thread(target=self._run, args=(self._engine,), name="engine", daemon=True)
        self._thread.start()

    async def stop(self, grace: float) -> None:
        """Ends held streams and the engine; what was learnt is written."""
        self._streams.close()
        if self._engine is not None and self._thread is not None:
            self._engine.stop()
            await asyncio.to_thread(self._thread.join, grace)
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.close)

    def state(self) -> WorkerState:
        """As it is announced."""
        engine, loaded = self._ready()
        return WorkerState(
            model="retrieval",
            tokenizer_digest="" if loaded.tokens is None else loaded.tokens.digest,
            capacity=self._settings.max_sessions,
            sessions=len(engine.roster),
        )

    @guarded
    async def Describe(
        self, request: draft_source_pb2.SourceDescribeRequest, context: Context
    ) -> draft_source_pb2.SourceDescription:
        """What this worker can follow. UNAVAILABLE while it loads."""
        engine, loaded = self._ready()
        tokens = loaded.tokens
        return draft_source_pb2.SourceDescription(
            name="retrieval",
            model="retrieval",
            tokenizer_digest="" if tokens is None else tokens.digest,
            vocabulary_size=ANY_ID if tokens is None else tokens.size,
            max_length=self._settings.max_length,
            names=engine.holdings.names,
            contract=CONTRACT,
            max_sessions=self._settings.max_sessions,
        )

    @guarded
    async def Attach(
        self, request_iterator: Requests, context: Context
    ) -> AsyncIterator[draft_source_pb2.AttachResponse]:
        """One verifier's stream. UNAVAILABLE while indexes are being mapped."""
        engine, loaded = self._ready()
        digest = "" if loaded.tokens is None else loaded.tokens.digest
        responses = self._streams.attach(
            request_iterator, context, engine.submit, model="retrieval", tokenizer_digest=digest
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

    def _ready(self) -> tuple[Engine, Loaded]:
        if self._engine is None or self._loaded is None:
            raise Unavailable("the retrieval worker is mapping its indexes")
        return self._engine, self._loaded


def _lookup_histogram(metrics: Metrics) -> Callable[[str, float], None]:
    seconds = metrics.histogram(
        "lookup_seconds", "One lookup in one memory.", ("memory",), buckets=LOOKUP_SECONDS
    )
    of = {name: seconds.labels(name) for name in NAMES}
    return lambda name, took: of[name].observe(took)


async def build(context: ServiceContext[RetrievalSettings]) -> Service:
    """The service, not yet loaded."""
    return announced(RetrievalService(context), context, waits=True)
