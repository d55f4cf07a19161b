"""The verifier's gRPC service: moves messages; the session manager and the engine do everything else.

Runs on the event loop; torch never runs there.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc.aio

from outrider.lm.contrast import ContrastingLM
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.outcome import OutcomeWants
from outrider.lm.runner import PackedLM
from outrider.lm.step_profile import profile_steps
from outrider.runtime.metrics import Metrics
from outrider.runtime.own_thread import in_own_thread
from outrider.runtime.tracing import Tracing
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.codec import finish_to_wire, key_from_wire
from outrider.wire.incoming.message_stream import MessageStream
from outrider.wire.incoming.unparsed import Unparsed, parsed, unparsed
from outrider.wire.origin import bound, current
from outrider.wire.status import guarded, guarded_unparsed
from outrider.wire.workers import WorkerState
from speculative.errors import Unavailable
from verifier_service.engine.messages import Command, StepReport
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.engine.thread import EngineThread
from verifier_service.grammar.grammars import Grammars
from verifier_service.learning.service import HeadLearning, learning_of
from verifier_service.loading import (
    description_of,
    digest_of_weights,
    load_amateur,
    numerics_of,
    served_model,
    state_of,
    tokens_of,
)
from verifier_service.observe.metrics import VerifierCollector
from verifier_service.observe.session_trace import SessionTracer
from verifier_service.proposers.batched import BatchedProposer, all_needs
from verifier_service.proposers.planning import plan_proposers
from verifier_service.remote_sources.pool import SourcePool
from verifier_service.remote_sources.stream import LinkLimits, link_limits_from
from verifier_service.sessions.manager import Capacity, SessionManager
from verifier_service.sessions.request import ServedModel, open_bounds, request_from_wire
from verifier_service.sessions.table import SessionTable
from verifier_service.sessions.watch import WATCH_BOUNDS, WatchReader, WatchReaders, request_pieces
from verifier_service.settings import VerifierSettings

log = logging.getLogger(__name__)

_BEAT_S = 0.1
_SWEEP_S = 0.25
_ENGINE_STOP_S = 1.0
_LEARNER_STOP_S = 0.5  # the learner is told at the beginning of a stop, and awaited at its end
_CHUNK_BYTES = 1024 * 1024

Context = grpc.aio.ServicerContext[Any, Any]
WatchRequests = Unparsed[verifier_pb2.WatchRequest] | verifier_pb2.WatchRequest


def _measured_costs(target: PackedLM) -> StepCostModel:
    """The costs of a target's steps: measured when its passes were compiled, or else measured now."""
    return StepCostModel.of(target.take_profile() or profile_steps(target))


class VerifierServer(verifier_pb2_grpc.VerifierServicer):
    """The verifier's gRPC service: its calls, its start and its stop.

    Args:
        settings: of the process.
        load: loads the target, in a thread of its own; raises OutriderError where that fails.
        metrics: the process's metrics, to which the verifier adds its own.
        fail: called with the error that ended the engine's thread.
        link_limits: times and bounds of the links to sources; None: as the settings say.
        measure: measures how long the loaded target's steps take.
        ranks: processes over which the target is split; more than one are part of its numerics.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        load: Callable[[], PackedLM],
        metrics: Metrics,
        fail: Callable[[BaseException], None],
        link_limits: LinkLimits | None = None,
        measure: Callable[[PackedLM], StepCostModel] = _measured_costs,
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        self._load = load
        self._measure = measure
        self._metrics = metrics
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._table = SessionTable()
        self._readers = WatchReaders(self._table)
        self._sources = SourcePool(self._put, link_limits or link_limits_from(settings))
        self._target: PackedLM | None = None
        self._engine: EngineThread | None = None
        self._manager: SessionManager | None = None
        self._learning: HeadLearning | None = None
        self._grammars: Grammars | None = None
        self._description = verifier_pb2.VerifierDescription()
        self._tokenizer = b""
        self._served = ServedModel("", 0, 0, 0)
        self._stopping = False
        self._failed = False
        self._quiet = asyncio.Event()  # set after a step that left no session running, or failed for good
        self._tasks: list[asyncio.Task[None]] = []
        self.tracing = Tracing()
        """Where sessions are traced; to be set before `start`."""

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds the servicer to `server`; returns the names of its services."""
        verifier_pb2_grpc.add_VerifierServicer_to_server(self, unparsed(server))
        return (verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name,)

    async def start(self) -> None:
        """Loads and checks the target, then starts the engine; readers get beats from the beginning."""
        beats = asyncio.create_task(self._beat_while_loading(), name="beats")
        try:
            learning = await in_own_thread(learning_of, self._settings, self._metrics)
            self._learning = learning  # a stop from now on closes its folder
            target = await in_own_thread(self._load)
            self._target = target  # a stop while its passes compile closes the target
            amateur = await in_own_thread(load_amateur, self._settings, target)
            proposers = await in_own_thread(_prepare, target, self._settings, learning)
            await self._compile_passes(target)
            costs = await in_own_thread(self._measure, target)
            tokens = await in_own_thread(tokens_of, target)
            weights = await in_own_thread(digest_of_weights, self._settings)
            self._grammars = await in_own_thread(Grammars, tokens, target.eos_ids, target.vocabulary_size)
        finally:
            beats.cancel()
        sys.setswitchinterval(self._settings.switch_interval_us / 1e6)
        self._describe(target, tokens, weights, proposers, amateur)
        passing = target if amateur is None else ContrastingLM(target, amateur)
        self._engine = EngineThread(
            passing,
            engine_limits(self._settings, target),
            self._publish,
            self._engine_failed,
            costs,
            proposers,
            target.take_profile,
        )
        reputations = self._ready().reputations
        self._metrics.registry.register(
            VerifierCollector(
                self._engine, self._sources, self._table, reputations, target, self._served.model
            )
        )
        self._tasks.append(asyncio.create_task(self._sweep(), name="sweep"))
        self._engine.start()
        if learning is not None:
            learning.start(target, self._put, lambda: self._table.running)

    async def stop(self, grace: float) -> None:
        """Stops the verifier: refuses new sessions, then ends every stream after `grace` seconds at most.

        Until then running sessions may end here or move elsewhere; the verifier announces that it drains.
        Sessions of an engine that has failed can only move, which they do as their streams end.
        """
        self._stopping = True
        if self._learning is not None:
            self._learning.end_soon()
        self._readers.drain()
        self._quiet.clear()
        if self._table.running and not self._failed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), grace)
        self._readers.close_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sources.close()
        if self._engine is not None and not await asyncio.to_thread(self._engine.stop, _ENGINE_STOP_S):
            log.warning("a step was still running")
        if self._target is not None:
            await asyncio.to_thread(self._target.close)
        if self._grammars is not None:
            self._grammars.close()
        if self._learning is not None:
            await asyncio.to_thread(self._learning.stop, _LEARNER_STOP_S)

    def state(self) -> WorkerState:
        """The state that this worker announces."""
        return state_of(self._described(), self._table.running, self._readers.step_s)

    @guarded
    async def Describe(
        self, request: verifier_pb2.VerifierDescribeRequest, context: Context
    ) -> verifier_pb2.VerifierDescription:
        """Returns the description of the loaded model and of this worker."""
        self._ready()
        return self._described()

    @guarded
    async def Tokenizer(
        self, request: verifier_pb2.TokenizerRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.TokenizerChunk]:
        """Streams the bytes of the tokenizer's file, in chunks of 1 MiB."""
        self._ready()
        for start in range(0, len(self._tokenizer), _CHUNK_BYTES):
            yield verifier_pb2.TokenizerChunk(data=self._tokenizer[start : start + _CHUNK_BYTES])

    @guarded_unparsed
    async def Open(
        self, request: Unparsed[verifier_pb2.OpenRequest] | verifier_pb2.OpenRequest, context: Context
    ) -> verifier_pb2.OpenResponse:
        """Opens a session, takes a session over, or changes a session's sources."""
        manager = self._ready()
        message = await parsed(request, open_bounds(self._served))
        asked = request_from_wire(message, self._served)
        matcher = None
        if asked.grammar is not None and self._grammars is not None:
            generated = asked.ids[asked.prompt_length :]
            matcher = await self._grammars.matcher(asked.grammar, generated)
        if self._stopping:
            raise Unavailable("this verifier is stopping")
        with bound(current(), tenant=asked.key.tenant, session=asked.key.session):
            opened = manager.open(asked, matcher, current())
        return verifier_pb2.OpenResponse(
            source_names=opened.source_names, finished=finish_to_wire(opened.finished)
        )

    @guarded_unparsed
    async def Watch(
        self, request_iterator: AsyncIterator[WatchRequests], context: Context
    ) -> AsyncIterator[verifier_pb2.WatchResponse]:
        """Streams beats, and the committed tokens of the sessions that the peer's cursors name."""
        if isinstance(request_iterator, MessageStream):
            request_iterator.draw_on(self._readers.account)
        reader = self._readers.open()
        reading = asyncio.create_task(_read_cursors(reader, request_iterator))
        try:
            async for response in reader.responses():
                yield response
        finally:
            self._readers.close(reader)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        raise Unavailable("this verifier is stopping")

    @guarded
    async def Cancel(
        self, request: verifier_pb2.VerifierCancelRequest, context: Context
    ) -> verifier_pb2.VerifierCancelResponse:
        """Ends a session; the response says whether the session was open."""
        found = self._ready().cancel(key_from_wire(request.key), request.epoch)
        return verifier_pb2.VerifierCancelResponse(found=found)

    @guarded
    async def Explain(
        self, request: explain_pb2.ExplainRequest, context: Context
    ) -> explain_pb2.ExplainResponse:
        """Returns the last rounds of a session, under each of its epochs."""
        return self._ready().tracer.explain(key_from_wire(request.key), request.nodes)

    def _ready(self) -> SessionManager:
        if self._manager is None:
            raise Unavailable("the model is still loading")
        return self._manager

    def _put(self, command: Command) -> None:
        assert self._engine is not None, "no session is opened before the engine is there"
        self._engine.put(command)

    def _publish(self, report: StepReport) -> None:
        """Hands a step's report to the event loop. Called from the engine's thread, once per step."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            self._loop.call_soon_threadsafe(self._absorb, report)

    def _engine_failed(self, error: BaseException) -> None:
        """Ends the process, which waits for no session any more. Called from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._wait_no_longer)
        self._fail(error)

    def _wait_no_longer(self) -> None:
        self._failed = True
        self._quiet.set()

    def _absorb(self, report: StepReport) -> None:
        assert self._manager is not None
        self._manager.absorb(report)
        if not self._table.running:
            self._quiet.set()

    def _describe(
        self,
        target: PackedLM,
        tokens: TokenTable | None,
        weights: str = "",
        batched: Iterable[str] = (),
        amateur: PackedLM | None = None,
    ) -> None:
        """Sets everything that depends on the loaded model and on the names of batched proposers."""
        settings = self._settings
        capacity = Capacity(settings.max_sessions, target.pool.max_slots, BLOCK)
        digest = "" if tokens is None else tokens.digest
        self._tokenizer = (target.tokenizer_json or "").encode()
        self._served = served_model(settings, target, capacity, batched, amateur)
        self._description = description_of(settings, target, self._served, digest, weights, self._ranks)
        self._manager = SessionManager(
            self._served,
            tokens,
            capacity,
            self._table,
            self._readers,
            self._sources,
            self._put,
            SessionTracer(self.tracing),
            *(() if self._learning is None else (self._learning.private, self._learning.collector.stopped)),
        )

    def _described(self) -> verifier_pb2.VerifierDescription:
        """The description, with the numerics class of the passes that run now."""
        if self._target is not None:
            self._description.numerics = numerics_of(self._target, self._ranks)
        return self._description

    async def _compile_passes(self, target: PackedLM) -> None:
        """Has the target's passes compiled as the settings say; the engine does not run yet."""
        settings = self._settings
        await in_own_thread(target.compile_passes, settings.passes, settings.cache_dir)

    async def _beat_while_loading(self) -> None:
        while True:
            self._readers.announce(step=0, expected_us=0)
            await asyncio.sleep(_BEAT_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self._ready().sweep(self._settings.orphan_grace_s, self._settings.lease_s)
                await self._sources.close_idle()
            except Exception:  # without the sweeps to come, no session would be parked or forgotten again
                log.exception("sweep failed")


def _prepare(
    target: PackedLM, settings: VerifierSettings, learning: HeadLearning | None
) -> dict[str, BatchedProposer]:
    """Makes the batched proposers, by source name, and has the target's passes give what they need.

    Steps are captured with it, so that none is captured while serving.
    """
    learnt = {} if learning is None else learning.make_head(target)
    plans = plan_proposers(settings)
    proposers = {name: learnt.get(name) or plan.make(target) for name, plan in plans.items()}
    needs = all_needs(proposers.values())
    target.wants = OutcomeWants(needs.tops, needs.layers)
    target.capture_steps()
    return proposers


def engine_limits(settings: VerifierSettings, target: PackedLM) -> EngineLimits:
    """The bounds of the engine's steps; none has more rows than the largest static step, where there are any.

    A larger step would be ragged, which is slow, and its sums may differ in the last bits.
    """
    most_rows = None if target.steps is None else target.steps.max_rows
    return EngineLimits(
        prefill_chunk=min(settings.prefill_chunk, most_rows or settings.prefill_chunk),
        most_rows=most_rows,
        wait_ms_most=settings.wait_ms_max,
        beat_s=_BEAT_S,
        stall_ms=settings.prefill_stall_ms,
        most_running=settings.max_running,
        reuse_prefixes=settings.prefix_cache,
        lease_s=settings.lease_s,
        adaptive=settings.budget == "adaptive",
    )


async def _read_cursors(reader: WatchReader, requests: AsyncIterator[WatchRequests]) -> None:
    """Passes the peer's requests to its reader. The stream stays open when the peer sends no more of them."""
    try:
        async for request in requests:
            for piece in request_pieces(await parsed(request, WATCH_BOUNDS)):
                reader.request(piece)
                await asyncio.sleep(0)
    except Exception as error:
        reader.fail(error)
