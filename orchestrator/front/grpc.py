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
from orchestrator.relay.delivery import Delivered, Finished, Recovered, Started
from orchestrator.relay.relay import Relay
from outrider.v1 import explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServicer
from outrider.wire.codec import SessionKey, checked_session, checked_tenant, finish_to_wire, key_from_wire
from outrider.wire.status import guarded
from speculative.errors import InvalidRequest, OutriderError

FIRST_MESSAGE_S = 30.0
REFUSAL_DELAY_S = 0.2
"""How long a refusal waits for the client's request, in seconds."""

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

    @guarded
    async def Generate(  # type: ignore[override]  # of grpc.aio's two styles the one that writes
        self, requests: AsyncIterator[generation_pb2.GenerateRequest], context: GenerateContext
    ) -> None:
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.entered(*credentials_of(context)))
            except OutriderError:
                await _arrived(requests)
                raise
            start = await _first(requests)
            start.tenant = caller.tenant(start.tenant)
            with reserved(self._limit, caller), self._metrics.begin() as measure:
                await self._generate(start, context, measure, caller)

    @guarded
    async def Cancel(
        self, request: generation_pb2.CancelRequest, context: CancelContext
    ) -> generation_pb2.CancelResponse:
        with self._gate.entered(*credentials_of(context)) as caller:
            tenant = caller.tenant(checked_tenant(request.tenant))
            key = SessionKey(tenant, checked_session(request.session))
            return generation_pb2.CancelResponse(found=await self._relay.cancel(key))

    @guarded
    async def Explain(
        self, request: explain_pb2.ExplainRequest, context: ExplainContext
    ) -> explain_pb2.ExplainResponse:
        with self._gate.entered(*credentials_of(context)) as caller:
            key = key_from_wire(request.key)
            return await explain(self._fleet, key._replace(tenant=caller.tenant(key.tenant)))

    @guarded
    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: ModelsContext
    ) -> generation_pb2.ListModelsResponse:
        with self._gate.entered(*credentials_of(context)):
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
                if isinstance(event, Recovered):
                    continue
                await context.write(_message(event, request, target, start.return_prompt_ids, epoch))
                epoch = epoch if isinstance(event, Finished) else event.epoch


async def _arrived(requests: AsyncIterator[generation_pb2.GenerateRequest]) -> None:
    """Wait for the request, if it is under way, before the client is refused.

    gRPC's client for asyncio may take a refusal that overtakes its request for a fault of its own, and report
    INTERNAL instead.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(REFUSAL_DELAY_S):
            await anext(aiter(requests), None)


async def _first(requests: AsyncIterator[generation_pb2.GenerateRequest]) -> generation_pb2.GenerateStart:
    """The client's request. Raises InvalidRequest where the client sends another message, or none."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            first = await anext(aiter(requests), None)
    except TimeoutError as error:
        raise InvalidRequest(f"no request came within {FIRST_MESSAGE_S:g} s of the call") from error
    if first is None or not first.HasField("start"):
        raise InvalidRequest("the first message must be `start`")
    return first.start


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
