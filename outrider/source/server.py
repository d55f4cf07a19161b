"""The DraftSource service of a source: streams in, the worker's thread behind, streams out."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, TypeVar

import grpc.aio

from outrider.runtime.metrics import PREFIX, Metrics
from outrider.runtime.own_thread import in_own_thread
from outrider.runtime.tracing import Tracing
from outrider.source.metrics import SourceCollector
from outrider.source.streams import AttachStreams, Context, Requests
from outrider.source.worker import Publish, SourceWorker
from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.channel import server_options
from outrider.wire.incoming.unparsed import unparsed
from outrider.wire.status import guarded, guarded_unparsed
from outrider.wire.workers import CONTRACT, WorkerState
from speculative.errors import Unavailable

log = logging.getLogger(__name__)

W = TypeVar("W", bound=SourceWorker[Any])

SWITCH_INTERVAL_S = 0.0002
"""Longest time that one thread may keep the interpreter from another; the default, 5 ms, exceeds a pass."""


def end_process(error: BaseException) -> None:
    """Ends the process at once, with status 1: without its worker a source only costs verifiers time."""
    os._exit(1)


class SourceServer(draft_source_pb2_grpc.DraftSourceServicer, Generic[W]):
    """Serves one source. A `Service` of `outrider.runtime`.

    Args:
        load: makes the worker, in a thread of its own; raises OutriderError if the source cannot be had.
        loading: what callers read until then.
        metrics: where the source's counts are shown.
        counters: help texts of the worker's own counts.
        gauges: help texts of the worker's own gauges.
        fail: called with the error that ended the worker's thread.
    """

    def __init__(
        self,
        load: Callable[[Publish], W],
        *,
        loading: str = "the source is starting",
        metrics: Metrics | None = None,
        counters: Mapping[str, str] | None = None,
        gauges: Mapping[str, str] | None = None,
        fail: Callable[[BaseException], None] = end_process,
        tracing: Tracing | None = None,
    ) -> None:
        self._load = load
        self._loading = loading
        self._fail = fail
        self._worker: W | None = None
        self._thread: threading.Thread | None = None
        metrics = metrics or Metrics("source")
        dropped = metrics.counter("nodes_unread", "Nodes dropped because a verifier did not read them.")
        self._streams = AttachStreams(dropped.inc, tracing)
        prefix = f"{PREFIX}{metrics.role}_"
        metrics.registry.register(SourceCollector(prefix, lambda: self._worker, counters or {}, gauges or {}))

    @property
    def worker(self) -> W:
        """The source's worker. Raises Unavailable until it is loaded."""
        if self._worker is None:
            raise Unavailable(self._loading)
        return self._worker

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds the DraftSource servicer; returns its name."""
        draft_source_pb2_grpc.add_DraftSourceServicer_to_server(self, unparsed(server))
        return (draft_source_pb2.DESCRIPTOR.services_by_name["DraftSource"].full_name,)

    async def start(self) -> None:
        """Loads the source and starts the worker's thread."""
        worker = await in_own_thread(self._load, self._streams.publish)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._worker = worker
        self._thread = threading.Thread(target=self._run, args=(worker,), name="worker", daemon=True)
        self._thread.start()

    async def stop(self, grace: float) -> None:
        """Ends open streams and the worker, within `grace` seconds."""
        self._streams.close()
        if self._worker is not None and self._thread is not None:
            self._worker.stop()
            await asyncio.to_thread(self._thread.join, grace)

    def state(self) -> WorkerState:
        """The source's state, which it announces to orchestrators."""
        worker = self.worker
        profile = worker.profile
        return WorkerState(
            model=profile.model,
            tokenizer_digest=profile.tokenizer_digest,
            numerics=profile.numerics,
            capacity=profile.max_sessions,
            sessions=len(worker.roster),
            step_s=worker.step_s,
        )

    @guarded
    async def Describe(
        self, request: draft_source_pb2.SourceDescribeRequest, context: Context
    ) -> draft_source_pb2.SourceDescription:
        """Describes which sessions this source can follow. UNAVAILABLE while it loads."""
        profile = self.worker.profile
        return draft_source_pb2.SourceDescription(
            name=profile.name,
            model=profile.model,
            tokenizer_digest=profile.tokenizer_digest,
            vocabulary_size=profile.vocabulary_size,
            max_length=profile.max_length,
            names=profile.names,
            contract=CONTRACT,
            max_sessions=profile.max_sessions,
            tops=profile.tops,
            tenant=profile.tenant,
            learns=profile.learns,
        )

    @guarded_unparsed
    async def Attach(
        self, request_iterator: Requests, context: Context
    ) -> AsyncIterator[draft_source_pb2.AttachResponse]:
        """Serves one verifier's stream. UNAVAILABLE while the source loads."""
        worker = self.worker
        responses = self._streams.attach(
            request_iterator,
            context,
            worker.submit,
            pending=worker.pending,
            model=worker.profile.model,
            tokenizer_digest=worker.profile.tokenizer_digest,
            max_length=worker.profile.max_length,
        )
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield response

    def _run(self, worker: W) -> None:
        try:
            worker.run()
        except BaseException as error:
            log.exception("the worker ended")
            self._fail(error)


async def serve_source(load: Callable[[Publish], SourceWorker[Any]], address: str) -> None:
    """Serves a source without certificates until cancelled: a whole program in one call.

    Prints host:port once the source is loaded. Raises OutriderError where it cannot be loaded.

    Args:
        load: makes the worker, in a thread of its own.
        address: host:port; port 0 picks a free port.
    """
    source = SourceServer(load)
    server = grpc.aio.server(options=server_options())
    source.register(server)
    port = server.add_insecure_port(address)
    await source.start()
    await server.start()
    print(f"{address.rpartition(':')[0]}:{port}", flush=True)
    await server.wait_for_termination()
