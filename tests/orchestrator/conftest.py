"""An orchestrator over real gRPC, in front of verifiers whose "model" is arithmetic."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest

from orchestrator.service import OrchestratorService, build
from orchestrator.settings import OrchestratorSettings
from outrider.client import AsyncClient
from outrider.runtime.metrics import Metrics
from outrider.runtime.serve import ServiceContext
from outrider.runtime.tracing import Tracing
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2, draft_source_pb2, explain_pb2, verifier_pb2
from outrider.v1.draft_source_pb2_grpc import DraftSourceServicer, add_DraftSourceServicer_to_server
from outrider.v1.verifier_pb2_grpc import VerifierServicer, add_VerifierServicer_to_server
from outrider.wire.channel import server_options
from outrider.wire.codec import SessionKey, finish_to_wire, key_from_wire
from outrider.wire.incoming.request_fields import REQUEST_FIELDS
from outrider.wire.status import guarded
from speculative.errors import OutriderError, StaleEpoch, Unavailable
from speculative.stop import FinishReason

VOCABULARY = 96
MAX_LENGTH = 64
SILENT_S = 30.0
"""How long a verifier may be silent, unless a test says otherwise: a busy machine holds up fakes too."""


def next_id(position: int) -> int:
    """The id that the toy target chooses at a position: never an end of sequence."""
    return 2 + (position * 7) % (VOCABULARY - 2)


@dataclass
class Session:
    """One open session of the fake verifier."""

    message: verifier_pb2.OpenRequest
    length: int
    finished: FinishReason | None = None


@dataclass
class FakeVerifier(VerifierServicer):
    """A verifier that keeps the contract, but for the faults that a test sets."""

    model: str = "toy"
    tokens: TokenTable | None = None
    eos_ids: tuple[int, ...] = (1,)
    """What it describes as end-of-sequence ids; it never ends a session at one of them by itself."""
    chat: str = ""
    """Its chat template."""
    response: str = ""
    """Its response template, as JSON."""
    drafts: bool = False
    """Whether every other id was drafted."""
    accepts: str = ""
    """The source that it says it has accepted a token of."""
    tick_s: float = 0.005
    per_tick: int = 2
    silent: bool = False
    """No beats and no tokens, as a frozen process."""
    answers: bool = True
    """Whether Describe is answered at once."""
    refusal: OutriderError | None = None
    """What Open answers instead."""
    refusals: dict[int, OutriderError] = field(default_factory=dict)
    """What it answers instead, once, by choice."""
    opened: list[verifier_pb2.OpenRequest] = field(default_factory=list)
    changed: list[verifier_pb2.OpenRequest] = field(default_factory=list)
    """Opens under the epoch that a session has: of other sources."""
    cancelled: list[tuple[SessionKey, int]] = field(default_factory=list)
    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    highest: int = 0
    address: str = ""
    server: Any = None
    numerics: str = "toy"
    contract: int = 0
    weights: str = ""
    samples: dict[str, Any] = field(default_factory=dict)
    """How its generation config says to sample."""
    cached: int = 0
    """How many tokens of each prompt it says it had cached."""
    max_length: int = MAX_LENGTH
    local_sources: tuple[str, ...] = ("lookup", "prediction", "references", "grammar")
    draining: bool = False
    """Whether its beats say so; it refuses new sessions then."""
    explained: list[explain_pb2.Incarnation] = field(default_factory=list)
    """What it remembers of any session of tenant `us`."""
    metadata: list[dict[str, str]] = field(default_factory=list)
    """What came with each Open."""
    request_fields: tuple[str, ...] = REQUEST_FIELDS
    """The fields of Open that it lists; empty: it is older than the list."""
    fault: verifier_pb2.Committed | None = None
    """Sent in place of what was committed."""
    intervals_ms: list[int] = field(default_factory=list)
    """The interval of each cursor, in order."""

    @guarded
    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierDescription:
        if not self.answers:
            await asyncio.sleep(60)
        return verifier_pb2.VerifierDescription(
            model=self.model,
            max_length=self.max_length,
            vocabulary_size=VOCABULARY,
            eos_ids=self.eos_ids,
            tokenizer_digest=self.tokens.digest if self.tokens else "",
            local_sources=self.local_sources,
            node_limit=16,
            max_sessions=8,
            numerics=self.numerics,
            contract=self.contract,
            weights_digest=self.weights,
            sampling_defaults=common_pb2.Sampling(**self.samples),
            request_fields=self.request_fields,
            chat_template=verifier_pb2.ChatTemplate(
                source=self.chat, tokens={"eos_token": "<eos>"}, response=self.response
            )
            if self.chat
            else None,
        )

    async def Tokenizer(self, request: Any, context: Any) -> AsyncIterator[verifier_pb2.TokenizerChunk]:
        data = self.tokens.to_json().encode() if self.tokens else b""
        for start in range(0, len(data), 1000):
            yield verifier_pb2.TokenizerChunk(data=data[start : start + 1000])

    @guarded
    async def Open(self, request: verifier_pb2.OpenRequest, context: Any) -> verifier_pb2.OpenResponse:
        if self.refusal is not None:
            raise self.refusal
        if self.draining:
            raise Unavailable("this verifier is stopping")
        if request.key.choice in self.refusals:
            raise self.refusals.pop(request.key.choice)
        known = self.sessions.get(key_from_wire(request.key))
        if known is not None and known.message.epoch == request.epoch:
            self.changed.append(request)
            return verifier_pb2.OpenResponse(source_names=[source.name for source in request.sources])
        if request.epoch < self.highest:
            raise StaleEpoch("an older epoch", self.highest)
        self.highest = request.epoch
        self.metadata.append(dict(context.invocation_metadata()))
        self.opened.append(request)
        begun = 1 if request.score_prompt else len(request.ids)
        self.sessions[key_from_wire(request.key)] = Session(request, begun)
        return verifier_pb2.OpenResponse(source_names=[source.name for source in request.sources])

    @guarded
    async def Cancel(self, request: Any, context: Any) -> verifier_pb2.VerifierCancelResponse:
        key = key_from_wire(request.key)
        session = self.sessions.get(key)
        if session is None or session.finished is not None:
            return verifier_pb2.VerifierCancelResponse(found=False)
        if request.epoch < session.message.epoch:
            raise StaleEpoch("an older epoch", session.message.epoch)
        self.cancelled.append((key, request.epoch))
        session.finished = FinishReason.CANCELLED
        return verifier_pb2.VerifierCancelResponse(found=True)

    async def Explain(self, request: explain_pb2.ExplainRequest, context: Any) -> explain_pb2.ExplainResponse:
        known = self.explained if request.key.tenant == "us" else []
        return explain_pb2.ExplainResponse(incarnations=known)

    async def Watch(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.WatchResponse]:
        cursors: dict[int, verifier_pb2.Cursor] = {}
        reader = asyncio.create_task(self._read(requests, cursors))
        step = 0
        try:
            while True:
                await asyncio.sleep(self.tick_s)
                if self.silent:
                    continue
                step += 1
                response = verifier_pb2.WatchResponse(
                    beat=verifier_pb2.Beat(step=step, draining=self.draining)
                )
                for session in self.sessions.values():
                    self._decode(session)
                response.committed.extend(
                    c for cursor in list(cursors.values()) if (c := self._committed(cursor, cursors))
                )
                yield response
        finally:
            reader.cancel()

    async def _read(self, requests: Any, cursors: dict[int, verifier_pb2.Cursor]) -> None:
        with contextlib.suppress(Exception):
            async for request in requests:
                cursors.update({cursor.alias: cursor for cursor in request.add})
                self.intervals_ms += [cursor.interval_ms for cursor in request.add]
                for alias in request.drop:
                    cursors.pop(alias, None)

    def id_at(self, session: Session, position: int) -> int:
        """The id that a session has at a position: its prompt's, or what the target chooses."""
        ids = session.message.ids
        return ids[position] if position < len(ids) else next_id(position)

    def _decode(self, session: Session) -> None:
        if session.finished is None:
            session.length = min(session.length + self.per_tick, session.message.limit)
            if session.length == session.message.limit:
                session.finished = FinishReason.LENGTH

    def _committed(
        self, cursor: verifier_pb2.Cursor, cursors: dict[int, verifier_pb2.Cursor]
    ) -> verifier_pb2.Committed | None:
        if self.fault is not None:
            self.fault.alias = cursor.alias
            return self.fault
        session = self.sessions.get(key_from_wire(cursor.key))
        if session is None or session.message.epoch != cursor.epoch:
            del cursors[cursor.alias]
            code = 5 if session is None else 10
            return verifier_pb2.Committed(alias=cursor.alias, code=code, message="not this one")
        if cursor.position == session.length and session.finished is None:
            return None
        ids = [self.id_at(session, position) for position in range(cursor.position, session.length)]
        committed = verifier_pb2.Committed(
            alias=cursor.alias,
            position=cursor.position,
            ids=ids,
            token_sources=bytes(position % 2 if self.drafts else 0 for position in range(len(ids))),
            finished=finish_to_wire(session.finished),
        )
        if session.message.HasField("logprobs"):
            top = range(2, 2 + session.message.logprobs.top_logprobs)
            logprob = common_pb2.TokenLogprob(
                logprob=-0.5, top_ids=top, top_logprobs=[-0.25 * id_ for id_ in top]
            )
            committed.logprobs.extend([logprob] * len(ids))
        cursor.position = session.length
        if session.finished is not None:
            committed.usage.completion_tokens = session.length - len(session.message.ids)
            committed.usage.admitted = committed.usage.completion_tokens if self.drafts else 0
            committed.usage.rounds = committed.usage.completion_tokens
            committed.usage.replay_identical = True
            committed.usage.cached_tokens = self.cached
            if self.drafts and session.message.sources:
                drafted = committed.usage.drafted_by_source
                drafted[session.message.sources[0].name] = committed.usage.completion_tokens
            if self.accepts:
                committed.usage.accepted_by_source[self.accepts] = 1
            del cursors[cursor.alias]
        return committed


@dataclass
class FakeSource(DraftSourceServicer):
    """A source that only describes itself."""

    name: str = "drafter"
    digest: str = ""
    names: tuple[str, ...] = ()
    contract: int = 0
    tenant: str = ""
    answers: bool = True
    """Whether Describe is answered."""
    asked: int = 0
    """Calls of Describe under way."""
    most_asked: int = 0

    async def Describe(self, request: Any, context: Any) -> draft_source_pb2.SourceDescription:
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        try:
            if not self.answers:
                await asyncio.sleep(60)
        finally:
            self.asked -= 1
        return draft_source_pb2.SourceDescription(
            name=self.name,
            tokenizer_digest=self.digest,
            names=self.names,
            contract=self.contract,
            tenant=self.tenant,
        )


@dataclass
class Front:
    """A running orchestrator and a client of it."""

    service: OrchestratorService
    address: str
    client: AsyncClient
    metrics: Metrics
    http: str = ""
    """URL of its HTTP front, if its settings name one."""
    registry: str = ""
    """Where workers register with it, likewise."""

    def sample(self, name: str, **labels: str) -> float:
        """Value of an orchestrator's metric, its own or a common one, summed over models."""
        own = self.metrics.registry.get_sample_value(f"outrider_orchestrator_{name}", labels)
        if own is not None:
            return own
        families = self.metrics.registry.collect()
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"outrider_{name}" and labels.items() <= sample.labels.items()
        )


async def listen(
    stack: contextlib.AsyncExitStack,
    add: Callable[[Any, grpc.aio.Server], None],
    servicer: Any,
    port: int = 0,
) -> tuple[str, grpc.aio.Server]:
    server = grpc.aio.server(options=server_options())
    add(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return address, server


class World:
    """Starts fakes and orchestrators; all of them end with the test."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self.source_servers: dict[str, Any] = {}
        """By address."""

    async def verifier(self, **how: Any) -> FakeVerifier:
        fake = FakeVerifier(**how)
        await self.serve(fake)
        return fake

    async def serve(self, fake: FakeVerifier) -> None:
        """Starts a fake server, at its earlier address if it had one."""
        port = int(fake.address.rpartition(":")[2]) if fake.address else 0
        fake.address, fake.server = await listen(self._stack, add_VerifierServicer_to_server, fake, port)

    async def source(self, fake: FakeSource | None = None, **how: Any) -> str:
        served = await listen(self._stack, add_DraftSourceServicer_to_server, fake or FakeSource(**how))
        address, self.source_servers[served[0]] = served
        return address

    async def front(
        self,
        verifiers: list[str],
        drafters: tuple[str, ...] = (),
        *,
        tracing: Tracing | None = None,
        **settings: Any,
    ) -> Front:
        patient = {"silent_s": SILENT_S} | settings
        parsed = OrchestratorSettings(verifier=verifiers, drafter=drafters, **patient)
        metrics = Metrics("orchestrator")
        context = ServiceContext(parsed, "", metrics, lambda error: None, tracing=tracing or Tracing())
        service = await build(context)
        address, _ = await listen(self._stack, lambda _, server: service.register(server) and None, None)
        await service.start()
        self._stack.push_async_callback(service.stop, 0.0)
        client = await self._stack.enter_async_context(AsyncClient(address))
        http, registry = (context.also.get(name, "") for name in ("http", "registry"))
        return Front(service, address, client, metrics, http, registry)

    async def until(self, happened: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while True:
                if happened():
                    return
                await asyncio.sleep(0.01)

    async def ready(self, front: Front, models: int = 1, sources: int = 1) -> Front:
        """Waits until the front serves `models` models, each with `sources` sources."""
        async with asyncio.timeout(60):
            while True:
                served = []
                with contextlib.suppress(
                    Unavailable
                ):  # a busy machine's first attempt to connect may time out
                    served = await front.client.models()
                if len(served) >= models and all(len(model.sources) >= sources for model in served):
                    return front
                await asyncio.sleep(0.02)


@pytest.fixture(scope="session", autouse=True)
def _authorities_read_once() -> Iterator[None]:
    """Each HTTP client would read the certificates of all authorities anew, longer than a request takes."""
    import httpcore2

    once = functools.cache(httpcore2.default_ssl_context)
    with mock.patch.object(httpcore2, "default_ssl_context", once):
        yield


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        yield World(stack)


@pytest.fixture(scope="session")
def table() -> TokenTable:
    """A tokenizer of 96 ids whose 0 and 1 are special, byte for byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [character for character in alphabet if character.isascii()] + ["Ġ", "Ċ"]
    vocabulary = {token: id_ for id_, token in enumerate(["<pad>", "<eos>", *printable][:VOCABULARY])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return TokenTable.from_json(tokenizer.to_str())
