"""Puts the retrieval worker together from its settings, and runs it inside a process."""

import asyncio
from collections.abc import Callable

import grpc.aio

from outrider.announcing import announced
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import Service, ServiceContext
from outrider.source.followed import ANY_ID, SourceProfile
from outrider.source.server import SourceServer
from outrider.source.worker import Publish
from outrider.v1 import retrieval_pb2, retrieval_pb2_grpc
from outrider.wire.incoming.unparsed import unparsed
from retrieval_service.catalogue import NAMES
from retrieval_service.loading import Loaded, load
from retrieval_service.server import RetrievalServer
from retrieval_service.settings import RetrievalSettings
from retrieval_service.worker import COUNTERS, GAUGES, RetrievalWorker
from speculative.errors import Unavailable

LOADING = "the retrieval worker is mapping its indexes"
ENDING = "the retrieval worker ends; ask again"
LOOKUP_SECONDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)


class RetrievalService(SourceServer[RetrievalWorker]):
    """The retrieval source and the Retrieval service, in one process."""

    def __init__(self, context: ServiceContext[RetrievalSettings]) -> None:
        super().__init__(
            self._make_worker,
            loading=LOADING,
            metrics=context.metrics,
            counters=COUNTERS,
            gauges=GAUGES,
            fail=context.fail,
            tracing=context.tracing,
        )
        self._settings = context.settings
        self._loaded: Loaded | None = None
        self._ending = False
        self._observe = _lookup_histogram(context.metrics)
        self._retrieval = RetrievalServer(context.settings, self._ready)

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds both servicers; returns their names."""
        retrieval_pb2_grpc.add_RetrievalServicer_to_server(self._retrieval, unparsed(server))
        return (
            *super().register(server),
            retrieval_pb2.DESCRIPTOR.services_by_name["Retrieval"].full_name,
        )

    async def stop(self, grace: float) -> None:
        """Ends open streams and the worker; writes past outputs. Refuses calls from now on."""
        self._ending = True
        await super().stop(grace)
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.close)

    def _make_worker(self, publish: Publish) -> RetrievalWorker:
        settings = self._settings
        self._loaded = loaded = load(settings)
        tokens = loaded.tokens
        profile = SourceProfile(
            name="retrieval",
            model="retrieval",
            tokenizer_digest="" if tokens is None else tokens.digest,
            vocabulary_size=ANY_ID if tokens is None else tokens.size,
            max_length=settings.max_length,
            max_sessions=settings.max_sessions,
            grace_s=settings.keep_s,
            names=loaded.catalogue.names,
            learns=loaded.past is not None,
            noun="service",
        )
        return RetrievalWorker(loaded.catalogue, profile, publish, self._observe, shape=settings.shape)

    def _ready(self) -> tuple[RetrievalWorker, Loaded]:
        if self._ending:  # what is loaded is being closed
            raise Unavailable(ENDING)
        if self._loaded is None:
            raise Unavailable(LOADING)
        return self.worker, self._loaded


def _lookup_histogram(metrics: Metrics) -> Callable[[str, float], None]:
    seconds = metrics.histogram(
        "lookup_seconds", "Duration of one lookup in one memory.", ("memory",), buckets=LOOKUP_SECONDS
    )
    of_memory = {name: seconds.labels(name) for name in NAMES}
    return lambda name, took: of_memory[name].observe(took)


async def build(context: ServiceContext[RetrievalSettings]) -> Service:
    """The retrieval service of these settings, not yet loaded."""
    return announced(RetrievalService(context), context, waits=True)
