"""The Generation service over gRPC: clients' messages in, responses out.

Knows of verifiers and sessions only their names; what happens in between is the relay's.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, suppress

import grpc.aio

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.admission import Admission
from orchestrator.front.auth import Caller, Gate, credentials_of
from orchestrator.front.concurrency import ConcurrencyLimit
from orchestrator.front.explain import explain
from orchestrator.front.reservation import reserved
from orchestrator.metrics import RequestMeasure, RequestMetrics
from orchestrator.relay.delivery import Delivered, Finished, PromptScored, Recovered, Started
from orchestrator.relay.relay import Relay
from outrider.v1 import explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServicer
from outrider.wire.codec import SessionKey, checked_session, checked_tenant, finish_to_wire, key_from_wire
from outrider.wire.incoming.unparsed import Unparsed, parsed
from outrider.wire.status import guarded_unparsed
from speculative.errors import InvalidRequest, OutriderError

FIRST_MESSAGE_S = 30.0
REFUSAL_DELAY_S = 0.2
"""How long a refusal waits for the client's request, in seconds."""

Incoming = Unparsed[generation_pb2.GenerateRequest] | generation_pb2.GenerateRequest
"""A message of a client: as bytes from a gRPC port, as a message where a server parses it."""
GenerateContext = grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
CancelContext = grpc.aio.ServicerContext[generation_pb2.CancelRequest, generation_pb2.CancelResponse]
ExplainContext = grpc.aio.ServicerContext[explain_pb2.ExplainRequest, explain_pb2.ExplainResponse]
ModelsContext = grpc.aio.ServicerContext[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse]


class GenerationServer(GenerationServicer):
    """Answers gRPC clients."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        relay: Relay,
        metrics: RequestMetrics,
        limit: ConcurrencyLimit,
        gate: Gate,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._limit = limit
        self._gate = gate

    @guarded_unparsed
    async def Generate(  # type: ignore[override]  # of grpc.aio's two styles the one that writes
        self, requests: AsyncIterator[Incoming], context: GenerateContext
    ) -> None:
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.entered(*credentials_of(context)))
            except OutriderError:
                await _arrived(requests)
                raise
            first = await _first(requests)
            with reserved(self._limit, caller):
                start = await self._start(first)
                start.tenant = caller.tenant(start.tenant)
                with self._metrics.begin() as measure:
                    await self._generate(start, context, measure, caller)

    @guarded_unparsed
    async def Cancel(
        self,
        request: Unparsed[generation_pb2.CancelRequest] | generation_pb2.CancelRequest,
        context: CancelContext,
    ) -> generation_pb2.CancelResponse:
        with self._gate.entered(*credentials_of(context)) as caller:
            asked = await parsed(request)
            tenant = caller.tenant(checked_tenant(asked.tenant))
            key = SessionKey(tenant, checked_session(asked.session))
            return generation_pb2.CancelResponse(found=await self._relay.cancel(key))

    @guarded_unparsed
    async def Explain(
        self,
        request: Unparsed[explain_pb2.ExplainRequest] | explain_pb2.ExplainRequest,
        context: ExplainContext,
    ) -> explain_pb2.ExplainResponse:
        with self._gate.entered(*credentials_of(context)) as caller:
            key = key_from_wire((await parsed(request)).key)
            return await explain(self._fleet, key._replace(tenant=caller.tenant(key.tenant)))

    @guarded_unparsed
    async def ListModels(
        self,
        request: Unparsed[generation_pb2.ListModelsRequest] | generation_pb2.ListModelsRequest,
        context: ModelsContext,
    ) -> generation_pb2.ListModelsResponse:
        with self._gate.entered(*credentials_of(context)):
            await parsed(request)
            return self._models()

    def _models(self) -> generation_pb2.ListModelsResponse:
        fleet = self._fleet
        return generation_pb2.ListModelsResponse(
            models=[
                generation_pb2.Model(
                    name=target.name,
                    max_length=target.max_length,
                    vocabulary_size=target.vocabulary_size,
                    has_tokenizer=target.tokens is not None,
                    sources=fleet.source_names(target),
                )
                for target in fleet.served()
            ]
        )

    async def _start(self, first: Incoming) -> generation_pb2.GenerateStart:
        """The client's request. Raises InvalidRequest where the first message is another one, or none."""
        message = await parsed(first, self._admission.bounds())
        if not message.HasField("start"):
            raise InvalidRequest("the first message must be `start`")
        return message.start

    async def _generate(
        self,
        start: generation_pb2.GenerateStart,
        context: GenerateContext,
        measure: RequestMeasure,
        caller: Caller,
    ) -> None:
        request, target = await self._admission.admit(start)
        measure.admitted(request, target)
        answer = self._relay.answer(request, target, context.time_remaining())
        async with aclosing(caller.charged(answer, request.tokens_read)) as events:
            epoch = 0
            async for event in events:
                measure.note(event)
                if isinstance(event, Recovered | PromptScored):  # scores are asked for over HTTP alone
                    continue
                await context.write(_message(event, request, target, start.return_prompt_ids, epoch))
                epoch = epoch if isinstance(event, Finished) else event.epoch


async def _arrived(requests: AsyncIterator[Incoming]) -> None:
    """Wait for the request, if it is under way, before the client is refused.

    gRPC's client for asyncio may take a refusal that overtakes its request for a fault of its own, and report
    INTERNAL instead.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_DELAY_S):
            await anext(aiter(requests), None)


async def _first(requests: AsyncIterator[Incoming]) -> Incoming:
    """The client's first message, as it came. Raises InvalidRequest where none comes."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            first = await anext(aiter(requests), None)
    except TimeoutError as error:
        raise InvalidRequest(f"no request came within {FIRST_MESSAGE_S:g} s of the call") from error
    if first is None:
        raise InvalidRequest("the first message must be `start`, but none came")
    return first


def _message(
    event: Started | Delivered | Finished,
    request: AdmittedRequest,
    target: TargetModel,
    return_prompt_ids: bool,
    known_epoch: int,
) -> generation_pb2.GenerateResponse:
    if isinstance(event, Started):
        return generation_pb2.GenerateResponse(
            started=generation_pb2.GenerateStarted(
                session=request.key.session,
                epoch=event.epoch,
                seed=request.seed,
                prompt_tokens=len(request.ids),
                prompt_ids=request.ids if return_prompt_ids else (),
                source_names=event.source_names,
                model=target.name,
            )
        )
    if isinstance(event, Finished):
        return generation_pb2.GenerateResponse(
            finished=generation_pb2.GenerateFinished(
                reason=finish_to_wire(event.reason),
                usage=event.usage,
                text=event.text,
                message=event.message,
                choice=event.choice,
                seed=request.seed_of(event.choice),
            )
        )
    delta = event.delta
    return generation_pb2.GenerateResponse(
        tokens=generation_pb2.GeneratedTokens(
            position=delta.position,
            ids=delta.ids,
            text=delta.text,
            token_sources=delta.token_sources,
            choice=event.choice,
            logprobs=delta.logprobs,
            epoch=event.epoch if event.epoch != known_epoch else 0,
        )
    )
