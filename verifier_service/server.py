"""The verifier's gRPC service: messages in and out, everything else behind the hub and the engine.

The event loop only moves messages; torch never runs on it.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from outrider.lm.blocks import BLOCK
from outrider.lm.packed import PackedLM
from outrider.lm.weights import weights_digest
from outrider.runtime.metrics import Metrics
from outrider.runtime.tracing import Tracing
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.codec import finish_to_wire, key_from_wire
from outrider.wire.origin import bound, current
from outrider.wire.status import guarded
from outrider.wire.workers import CONTRACT, WorkerState
from speculative.errors import ModelRefused, Unavailable
from verifier_service.chronicle import Chronicle
from verifier_service.engine.messages import Batch, Command
from verifier_service.engine.step import EngineLimits
from verifier_service.engine.step_cost import StepCostModel, profile_steps
from verifier_service.engine.thread import EngineThread
from verifier_service.grammar.grammars import Grammars
from verifier_service.hub import Hub, Room
from verifier_service.loading import chat_to_wire, state_of, tokens_of
from verifier_service.metrics import VerifierCollector
from verifier_service.registry import Registry
from verifier_service.request import MAX_NODES, Served, request_from_wire
from verifier_service.settings import VerifierSettings
from verifier_service.sources import LOCAL_SOURCES
from verifier_service.sources.following import LinkLimits, limits_of_links
from verifier_service.sources.links import Links
from verifier_service.watch import Reader, Watchers

log = logging.getLogger(__name__)

_BEAT_S = 0.1
_SWEEP_S = 0.25
_CHUNK_BYTES = 1024 * 1024

Context = grpc.aio.ServicerContext[Any, Any]


class VerifierServer(verifier_pb2_grpc.VerifierServicer):
    """A `Service` of `outrider.runtime`.

    Args:
        load: makes the target, in a thread of its own; raises OutriderError where it cannot be had.
        fail: told what ended the engine's thread.
        link_limits: times and bounds of the links to sources.
        measure: how long the loaded target's steps take.
        ranks: processes that hold the target; how it is split is part of its numerics.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        load: Callable[[], PackedLM],
        metrics: Metrics,
        fail: Callable[[BaseException], None],
        link_limits: LinkLimits | None = None,
        measure: Callable[[PackedLM], StepCostModel] = profile_steps,
        ranks: int = 1,
    ) -> None:
        self._split = "" if ranks == 1 else f" {ranks} ranks"
        self._settings = settings
        self._load = load
        self._measure = measure
        self._metrics = metrics
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._registry = Registry()
        self._watchers = Watchers(self._registry)
        self._links = Links(self._put, link_limits or limits_of_links(settings))
        self._engine: EngineThread | None = None
        self._hub: Hub | None = None
        self._grammars: Grammars | None = None
        self._description = verifier_pb2.VerifierDescription()
        self._tokenizer = b""
        self._served = Served("", 0, 0, 0)
        self._stopping = False
        self._quiet = asyncio.Event()  # after a step that left no session running
        self._tasks: list[asyncio.Task[None]] = []
        self.tracing = Tracing()
        """Of sessions; to be set before `start`."""

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        """Adds the servicer; returns its name."""
        verifier_pb2_grpc.add_VerifierServicer_to_server(self, server)
        return (verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name,)

    async def start(self) -> None:
        """Loads and checks the target, then starts the engine. Beats go out meanwhile."""
        beats = asyncio.create_task(self._beat_while_loading(), name="beats")
        try:
            target = await asyncio.to_thread(self._load)
            pace = await asyncio.to_thread(self._measure, target)
            tokens = await asyncio.to_thread(tokens_of, target)
            weights = await asyncio.to_thread(weights_digest, self._settings.model)
            self._grammars = await asyncio.to_thread(Grammars, tokens, target.eos_ids, target.vocabulary_size)
        finally:
            beats.cancel()
        sys.setswitchinterval(self._settings.switch_interval_us / 1e6)
        self._describe(target, tokens, weights)
        settings = self._settings
        limits = EngineLimits(
            prefill_chunk=settings.prefill_chunk,
            wait_ms_most=settings.wait_ms_max,
            beat_s=_BEAT_S,
            stall_ms=settings.prefill_stall_ms,
            most_running=settings.max_running,
            reuse_prefixes=settings.prefix_cache,
            lease_s=settings.lease_s,
            adaptive=settings.budget == "adaptive",
        )
        self._engine = EngineThread(target, limits, self._publish, self._fail, pace)
        self._metrics.registry.register(
            VerifierCollector(self._engine, self._links, self._registry, target.pool, self._served.model)
        )
        self._tasks.append(asyncio.create_task(self._sweep(), name="sweep"))
        self._engine.start()

    async def stop(self, grace: float) -> None:
        """Takes no more sessions and says so; lets those that run go on here or move elsewhere for `grace`
        seconds, then ends every stream."""
        self._stopping = True
        self._watchers.drain()
        self._quiet.clear()
        if self._registry.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), grace)
        self._watchers.close_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._links.close()
        if self._engine is not None and not await asyncio.to_thread(self._engine.stop, 1.0):
            log.warning("a step was still running")
        if self._grammars is not None:
            self._grammars.close()

    def state(self) -> WorkerState:
        """As it is announced."""
        return state_of(self._description, self._registry.running, self._watchers.step_s)

    @guarded
    async def Describe(
        self, request: verifier_pb2.VerifierDescribeRequest, context: Context
    ) -> verifier_pb2.VerifierDescription:
        """See the contract."""
        self._ready()
        return self._description

    @guarded
    async def Tokenizer(
        self, request: verifier_pb2.TokenizerRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.TokenizerChunk]:
        """See the contract."""
        self._ready()
        for start in range(0, len(self._tokenizer), _CHUNK_BYTES):
            yield verifier_pb2.TokenizerChunk(data=self._tokenizer[start : start + _CHUNK_BYTES])

    @guarded
    async def Open(self, request: verifier_pb2.OpenRequest, context: Context) -> verifier_pb2.OpenResponse:
        """See the contract."""
        hub, asked = self._ready(), request_from_wire(request, self._served)
        matcher = None
        if asked.grammar is not None and self._grammars is not None:
            generated = asked.ids[asked.prompt_length :]
            matcher = await self._grammars.matcher(asked.grammar, generated)
        if self._stopping:
            raise Unavailable("this verifier is stopping")
        with bound(current(), tenant=asked.key.tenant, session=asked.key.session):
            opened = hub.open(asked, matcher, current())
        return verifier_pb2.OpenResponse(
            source_names=opened.source_names, finished=finish_to_wire(opened.finished)
        )

    @guarded
    async def Watch(
        self, request_iterator: AsyncIterator[verifier_pb2.WatchRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.WatchResponse]:
        """See the contract."""
        reader = self._watchers.open()
        reading = asyncio.create_task(_read_cursors(reader, request_iterator))
        try:
            async for response in reader.responses():
                yield response
        finally:
            self._watchers.close(reader)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        raise Unavailable("this verifier is stopping")

    @guarded
    async def Cancel(
        self, request: verifier_pb2.VerifierCancelRequest, context: Context
    ) -> verifier_pb2.VerifierCancelResponse:
        """See the contract."""
        found = self._ready().cancel(key_from_wire(request.key), request.epoch)
        return verifier_pb2.VerifierCancelResponse(found=found)

    @guarded
    async def Explain(
        self, request: explain_pb2.ExplainRequest, context: Context
    ) -> explain_pb2.ExplainResponse:
        """See the contract."""
        return self._ready().explained(key_from_wire(request.key))

    def _ready(self) -> Hub:
        if self._hub is None:
            raise Unavailable("the model is still loading")
        return self._hub

    def _put(self, command: Command) -> None:
        assert self._engine is not None, "nothing is opened before the engine is there"
        self._engine.put(command)

    def _publish(self, batch: Batch) -> None:
        """From the engine's thread: one wake of the loop per step."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            self._loop.call_soon_threadsafe(self._absorb, batch)

    def _absorb(self, batch: Batch) -> None:
        assert self._hub is not None
        self._hub.absorb(batch)
        if not self._registry.running:
            self._quiet.set()

    def _describe(self, target: PackedLM, tokens: TokenTable | None, weights: str = "") -> None:
        """Fills in everything that depends on the model."""
        settings = self._settings
        room = Room(settings.max_sessions, target.pool.max_slots, BLOCK)
        max_length = min(target.max_length, room.longest(MAX_NODES))
        if max_length < 2:
            raise ModelRefused(
                f"kv_mb = {settings.kv_mb} gives {room.slots} KV slots, too few for one session of "
                f"{target.model_type}; give more",
                target.model_type,
            )
        self._tokenizer = (target.tokenizer_json or "").encode()
        self._served = Served(
            settings.model_name or target.name,
            target.vocabulary_size,
            max_length,
            settings.node_limit,
            frozenset(target.eos_ids),
            settings.deterministic,
        )
        numerics = target.numerics if settings.deterministic else f"{settings.device} {settings.dtype}"
        self._description = verifier_pb2.VerifierDescription(
            model=self._served.model,
            max_length=max_length,
            vocabulary_size=target.vocabulary_size,
            eos_ids=target.eos_ids,
            tokenizer_digest="" if tokens is None else tokens.digest,
            local_sources=sorted(LOCAL_SOURCES),
            node_limit=MAX_NODES,
            max_sessions=settings.max_sessions,
            model_type=target.model_type,
            numerics=numerics + self._split,
            chat_template=chat_to_wire(target),
            contract=CONTRACT,
            weights_digest=weights,
        )
        parts = (self._registry, self._watchers, self._links, self._put, Chronicle(self.tracing))
        self._hub = Hub(self._served, tokens, room, *parts)

    async def _beat_while_loading(self) -> None:
        while True:
            self._watchers.announce(step=0, expected_us=0)
            await asyncio.sleep(_BEAT_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._ready().sweep(self._settings.orphan_grace_s, self._settings.lease_s)
            await self._links.drop_idle()


async def _read_cursors(reader: Reader, requests: AsyncIterator[verifier_pb2.WatchRequest]) -> None:
    """Feeds a reader until its peer says no more, which ends nothing."""
    try:
        async for request in requests:
            reader.request(request)
    except Exception as error:
        reader.fail(error)
