"""The Generation service over gRPC: clients' messages in, responses out.

Knows of verifiers and sessions only their names; what happens in between is the relay's.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress

import grpc.aio

from orchestrator.edge.drafters import DraftersOf
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.admission import owned_session
from orchestrator.front.auth import Gate, credentials_of
from orchestrator.front.explain import explain
from orchestrator.front.generating import Incoming, StreamAnswerer
from orchestrator.relay.relay import Relay
from outrider.v1 import explain_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationServicer
from outrider.wire.codec import SessionKey, checked_tenant, key_from_wire
from outrider.wire.incoming.unparsed import Unparsed, parsed
from outrider.wire.status import guarded_unparsed
from speculative.errors import InvalidRequest, OutriderError

FIRST_MESSAGE_S = 30.0
REFUSAL_DELAY_S = 0.2
"""How long a refusal waits for the client's request, in seconds."""
MOST_DELAYED = 64
"""Refusals that wait at a time; a client that opens more calls than that is refused at once."""
GenerateContext = grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
CancelContext = grpc.aio.ServicerContext[generation_pb2.CancelRequest, generation_pb2.CancelResponse]
ExplainContext = grpc.aio.ServicerContext[explain_pb2.ExplainRequest, explain_pb2.ExplainResponse]
ModelsContext = grpc.aio.ServicerContext[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse]


class GenerationServer(GenerationServicer):
    """Answers gRPC clients."""

    def __init__(
        self,
        fleet: Fleet,
        relay: Relay,
        answerer: StreamAnswerer,
        gate: Gate,
        drafters_of: DraftersOf,
    ) -> None:
        self._drafters_of = drafters_of
        self._fleet = fleet
        self._relay = relay
        self._answerer = answerer
        self._gate = gate
        self._refusals = RefusalDelay()

    @guarded_unparsed
    async def Generate(  # type: ignore[override]  # of grpc.aio's two styles the one that writes
        self, requests: AsyncIterator[Incoming], context: GenerateContext
    ) -> None:
        with ExitStack() as stack:
            try:
                caller = stack.enter_context(self._gate.entered(*credentials_of(context)))
            except OutriderError:
                await self._refusals.wait(requests)
                raise
            first = await _first(requests)
            await self._answerer.answer(first, requests, context.write, caller, context.time_remaining())

    @guarded_unparsed
    async def Cancel(
        self,
        request: Unparsed[generation_pb2.CancelRequest] | generation_pb2.CancelRequest,
        context: CancelContext,
    ) -> generation_pb2.CancelResponse:
        with self._gate.entered(*credentials_of(context)) as caller:
            asked = await parsed(request)
            tenant = caller.tenant(checked_tenant(asked.tenant))
            key = SessionKey(tenant, owned_session(asked.session, caller.owner))
            return generation_pb2.CancelResponse(found=await self._relay.cancel(key))

    @guarded_unparsed
    async def Explain(
        self,
        request: Unparsed[explain_pb2.ExplainRequest] | explain_pb2.ExplainRequest,
        context: ExplainContext,
    ) -> explain_pb2.ExplainResponse:
        with self._gate.entered(*credentials_of(context)) as caller:
            asked = await parsed(request)
            key = key_from_wire(asked.key)
            session = owned_session(key.session, caller.owner)
            key = key._replace(tenant=caller.tenant(key.tenant), session=session)
            return await explain(self._fleet, key, nodes=asked.nodes)

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
                    tokenizer_digest=target.tokenizer_digest,
                    drafters=self._drafters_of(target),
                )
                for target in fleet.served()
            ]
        )


class RefusalDelay:
    """Has refusals wait for the client's request.

    gRPC's client for asyncio may take a refusal that overtakes its request for a fault of its own, and report
    INTERNAL instead. Waiting costs the event loop about as much as the call itself.
    """

    def __init__(self) -> None:
        self._waiting = 0

    async def wait(self, requests: AsyncIterator[Incoming]) -> None:
        """Waits for the request, if it is under way and not too many others wait."""
        if self._waiting >= MOST_DELAYED:
            return
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(REFUSAL_DELAY_S):
                    await anext(aiter(requests), None)
        finally:
            self._waiting -= 1


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
