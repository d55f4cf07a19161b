"""One Generate stream of any front: a request in, responses out, a device's drafts in.

Fronts bring the caller, the client's messages and a way to send; all from the first message on is here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.edge.devices import DeviceFlow, Devices
from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.admission import Admission
from orchestrator.front.auth import Caller
from orchestrator.front.concurrency import ConcurrencyLimit
from orchestrator.front.reservation import reserved
from orchestrator.metrics import RequestMetrics
from orchestrator.relay.delivery import Delivered, Event, Finished, PromptScored, Recovered, Started
from orchestrator.relay.relay import Relay
from outrider.v1 import generation_pb2
from outrider.wire.codec import finish_to_wire
from outrider.wire.incoming.unparsed import Unparsed, parsed
from outrider.wire.names import EDGE
from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

Incoming = Unparsed[generation_pb2.GenerateRequest] | generation_pb2.GenerateRequest
"""A message of a client: bytes, or a message that the server has parsed already."""
Send = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]


class StreamAnswerer:
    """Answers Generate streams of every front."""

    def __init__(
        self,
        admission: Admission,
        relay: Relay,
        metrics: RequestMetrics,
        limit: ConcurrencyLimit,
        devices: Devices,
    ) -> None:
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._limit = limit
        self._devices = devices

    async def answer(
        self,
        first: Incoming,
        more: AsyncIterator[Incoming],
        send: Send,
        caller: Caller,
        time_left: float | None = None,
    ) -> None:
        """Answers the request in `first`; `more` are the messages behind it. Raises OutriderError.

        Args:
            time_left: seconds until the request's deadline; None: it has none.
        """
        with reserved(self._limit, caller):
            start = await self._start(first)
            start.tenant = caller.tenant(start.tenant)
            with self._metrics.begin() as measure:
                request, target = await self._admission.admit(start, caller.owner)
                measure.admitted(request, target)
                with self._attached(start, request, target) as device:
                    if device.flow is None:
                        request = _without_device(request)
                    answer = self._relay.answer(request, target, time_left)
                    told = request.key.session.removeprefix(caller.owner)
                    responses = _Responses(request, target, told, start.return_prompt_ids, device)
                    events = caller.charged(answer, request.tokens_read)
                    async with aclosing(events), _heard(device.flow, more):
                        async for event in events:
                            measure.note(event)
                            if (response := responses.of(event)) is not None:
                                await send(response)

    @contextmanager
    def _attached(
        self, start: generation_pb2.GenerateStart, request: AdmittedRequest, target: TargetModel
    ) -> Iterator["_Attached"]:
        if not start.HasField("device"):
            yield _Attached()
            return
        with self._devices.attached(start.device, request, target) as (flow, terms):
            yield _Attached(flow, terms)

    async def _start(self, first: Incoming) -> generation_pb2.GenerateStart:
        """The client's request. Raises InvalidRequest where the first message is another one, or none."""
        message = await parsed(first, self._admission.bounds())
        if not message.HasField("start"):
            raise InvalidRequest("the first message must be `start`")
        return message.start


@dataclass(frozen=True, slots=True)
class _Attached:
    """The device of a request and its terms; neither if the request has no device."""

    flow: DeviceFlow | None = None
    terms: generation_pb2.DeviceTerms | None = None


def _without_device(request: AdmittedRequest) -> AdmittedRequest:
    """The request without its device, if it had one: the other sources that it names draft alone."""
    if not request.device:
        return request
    asked = request.speculation
    others = tuple(name for name in asked.sources if name != EDGE)
    enabled = asked.enabled and bool(others or not asked.sources)
    return replace(request, device=False, speculation=replace(asked, sources=others, enabled=enabled))


@asynccontextmanager
async def _heard(device: DeviceFlow | None, more: AsyncIterator[Incoming]) -> AsyncIterator[None]:
    """Gives the device's drafts to its flow while the context lasts. A fault only stops the drafts."""
    if device is None:
        yield
        return
    hearing = asyncio.create_task(_hear(device, more), name="device")
    try:
        yield
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


async def _hear(device: DeviceFlow, more: AsyncIterator[Incoming]) -> None:
    try:
        async for incoming in more:
            message = await parsed(incoming)
            if not message.HasField("drafts"):
                device.mute("after the request only `drafts` may come")
                return
            device.take(message.drafts)
    except InvalidRequest as error:
        device.mute(str(error))
    except Exception:  # the answer goes on whatever happens to drafts
        log.exception("a device's drafts were not read")
    finally:
        device.gone()


class _Responses:
    """Makes the messages of one stream out of the relay's events."""

    def __init__(
        self,
        request: AdmittedRequest,
        target: TargetModel,
        session: str,
        return_prompt_ids: bool,
        device: _Attached,
    ) -> None:
        self._session = session
        """The session's name as the client knows it."""
        self._request = request
        self._target = target
        self._return_prompt_ids = return_prompt_ids
        self._device = device
        self._epoch = 0
        """The epoch last sent to the client."""

    def of(self, event: Event) -> generation_pb2.GenerateResponse | None:
        """The message for the client about an event; None if the client needs none."""
        match event:
            case Started():
                return generation_pb2.GenerateResponse(started=self._started(event))
            case Delivered():
                return generation_pb2.GenerateResponse(tokens=self._tokens(event))
            case Finished():
                return generation_pb2.GenerateResponse(finished=self._finished(event))
            case Recovered() | PromptScored():  # scores are asked for over HTTP alone
                return None

    def _started(self, event: Started) -> generation_pb2.GenerateStarted:
        request = self._request
        self._tell(event.epoch)
        return generation_pb2.GenerateStarted(
            session=self._session,
            epoch=event.epoch,
            seed=request.seed,
            prompt_tokens=len(request.ids),
            prompt_ids=request.ids if self._return_prompt_ids else (),
            source_names=event.source_names,
            model=self._target.name,
            device=self._device.terms,
        )

    def _tokens(self, event: Delivered) -> generation_pb2.GeneratedTokens:
        delta, flow = event.delta, self._device.flow
        moved = event.epoch != self._epoch
        self._tell(event.epoch)
        return generation_pb2.GeneratedTokens(
            position=delta.position,
            ids=delta.ids,
            text=delta.text,
            token_sources=delta.token_sources,
            choice=event.choice,
            logprobs=delta.logprobs,
            epoch=event.epoch if moved else 0,
            prefix_hash=0 if flow is None else flow.delivered(event.choice, delta.ids),
        )

    def _finished(self, event: Finished) -> generation_pb2.GenerateFinished:
        flow = self._device.flow
        return generation_pb2.GenerateFinished(
            reason=finish_to_wire(event.reason),
            usage=event.usage,
            text=event.text,
            message=event.message,
            choice=event.choice,
            seed=self._request.seed_of(event.choice),
            device=None if flow is None else flow.ended(event.choice),
        )

    def _tell(self, epoch: int) -> None:
        self._epoch = epoch
        if self._device.flow is not None:
            self._device.flow.told(epoch)
