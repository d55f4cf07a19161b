"""The way of one admitted request: open, pass tokens on, recover, end everywhere.

If its verifier is lost, the request is opened on another one.

Tokens are the truth: the tokens that the client has are all that another verifier needs to go on. This module
knows nothing of how the request came in, nor of the stream that answers it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from functools import partial

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.placement import ChosenSource
from orchestrator.fleet.target_model import TargetModel
from orchestrator.fleet.verifier_link import VerifierLost
from orchestrator.relay.delivery import (
    Delivered,
    Delivery,
    Event,
    Finished,
    PromptScored,
    Recovered,
    Started,
)
from orchestrator.relay.opener import OlderVerifier, Opener, OpenPlan, Placement
from orchestrator.relay.request_state import RecoveryPauses, RequestDeadline, RequestState
from orchestrator.store.ledger import Ledger, Whereabouts
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import CommittedCode, finish_from_wire
from outrider.wire.criteria import promise_to_wire
from outrider.wire.status import peer_text
from speculative.acceptance.criterion import Promise
from speculative.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Superseded,
    Unavailable,
)
from speculative.stop import FinishReason, stop_bytes
from speculative.text import TextStream

log = logging.getLogger(__name__)

MOVE_S = 2.0
"""The longest that a stream rests while another verifier is asked to take it over, in seconds."""


class Moved(Exception):
    """Another verifier has the sessions, at `placement`."""

    def __init__(self, placement: Placement, took_s: float) -> None:
        super().__init__(placement.link.address)
        self.placement = placement
        self.took_s = took_s


class RelayedRequest:
    """One request while it is answered; `sources` are those that draft for it at first."""

    def __init__(
        self,
        fleet: Fleet,
        opener: Opener,
        ledger: Ledger,
        deadline: RequestDeadline,
        request: AdmittedRequest,
        target: TargetModel,
        sources: tuple[ChosenSource, ...],
        state: RequestState,
    ) -> None:
        self._fleet = fleet
        self._opener = opener
        self._ledger = ledger
        self._deadline = deadline
        self._request = request
        self.target = target
        """The model that answers."""
        self.sources = sources
        """The sources that draft for the request."""
        self._state = state
        self._placement: Placement | None = None
        self._ended_lost = False
        """Whether the last choices ended while no verifier had them."""
        self._cancel_watch: asyncio.Task[None] | None = None
        self.epoch = 0
        """The latest epoch under which the request was opened; 0: none yet."""
        self._numerics: set[str] = set()  # of all verifiers that had the request
        self._source_names: tuple[str, ...] = ()
        """Names by source index as the client was told them; verifiers may have other ones inside."""
        self._indices = bytes(256)
        """Translates the source indices of the verifier that has the request; see `Placement.indices_as`."""
        self._unfinished = {
            choice: Delivery(len(request.ids), _text_of(request, target), have, score=request.score_prompt)
            for choice, have in enumerate(request.have or ((),) * request.choices)
            if choice not in request.ended
        }

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    @property
    def is_kept(self) -> bool:
        """Whether every choice has ended at a verifier, which keeps the keys and values for a while."""
        return self.ended and not self._ended_lost

    def sources_instead(self, staying: Collection[str] = ()) -> tuple[ChosenSource, ...]:
        """The sources that the request should have now; see `Fleet.sources_instead`."""
        tenant = self._request.key.tenant
        return self._fleet.sources_instead(self.target, self.sources, tenant=tenant, staying=staying)

    def use(self, sources: tuple[ChosenSource, ...]) -> None:
        """Have these sources draft for the request from its next opening on, or from `send_sources` on."""
        self._fleet.count_sessions(self.sources, -self._request.choices)
        self._fleet.count_sessions(sources, self._request.choices)
        self.sources = sources

    async def send_sources(self) -> None:
        """Name the sources to the verifier that has the request, if one has. Raises OutriderError."""
        if self._placement is not None:
            await self._opener.change_sources(self._placement, self.sources, self._generated())

    async def events(self, known: Whereabouts) -> AsyncGenerator[Event, None]:
        """Yield Started, then what is delivered, then Finished for each choice.

        Closing the generator early ends all choices, or detaches from them where the request is resumable.
        Raises OutriderError.
        """
        resumes = self._request.have is not None
        self._opener.heard_of(known.epoch)
        placement = await self._open(self._plan(self._request.seen_epoch, recovered=resumes), known)
        # The client learns the names once. A verifier that follows may lack some of them, or have more.
        wanted = (source.name for source in self.sources)
        self._source_names = tuple(dict.fromkeys((*placement.source_names, *wanted)))
        first: Event = Started(placement.epoch, self._source_names)
        try:
            async with aclosing(self._across_verifiers(placement, first)) as events:
                async for event in events:
                    yield event
        finally:
            self._end_cancel_watch()

    async def _across_verifiers(self, placement: Placement, first: Event) -> AsyncGenerator[Event, None]:
        """Yield `first`, then the events of this placement and of those that follow it."""
        while True:
            if placement.epoch != self._opener.first:
                # A Cancel may have gone to where the session was before.
                self._end_cancel_watch()
                self._cancel_watch = asyncio.create_task(self._heed_cancel(placement), name="cancels")
            try:
                async with aclosing(self._read(placement, first)) as events:
                    async for event in events:
                        yield event
                return
            except VerifierLost as lost:
                began = time.monotonic()
                recovered = await self._recover(placement, lost)
                if recovered is None:
                    for event in self._cancelled():
                        yield event
                    return
                placement, first = recovered, Recovered(time.monotonic() - began)
            except Moved as moved:
                placement, first = moved.placement, Recovered(moved.took_s)

    async def _read(self, placement: Placement, first: Event) -> AsyncGenerator[Event, None]:
        """Yield `first`, then what the verifier commits, until it says why the last choice ended."""
        positions = {choice: it.position for choice, it in self._unfinished.items()}
        readers = placement.read(positions, self._request.message_interval_ms)
        self._state.attach(readers.fail)
        self._placement, self._indices = placement, placement.indices_as(self._source_names)
        try:
            if self._state.cancelled:
                placement.cancel_soon()
            yield first
            while readers:
                for choice, committed in await readers.take():
                    if choice in readers:
                        for event in self._take(choice, committed, placement):
                            if isinstance(event, Finished):
                                readers.end(choice)
                            yield event
                if readers.take_urge():
                    await self._move(placement)
        except (GeneratorExit, asyncio.CancelledError):
            if self._request.resumable:
                readers.detach()
            raise
        finally:
            self._placement = None
            readers.cancel()

    async def _heed_cancel(self, placement: Placement) -> None:
        """Cancel the request if it was cancelled elsewhere while it moved here.

        Another orchestrator may have sent the Cancel to the request's old verifier.
        """
        if await self._ledger.was_cancelled_meanwhile(self._request.key, placement.epoch):
            self._state.cancel()
            placement.cancel_soon()

    def _end_cancel_watch(self) -> None:
        if self._cancel_watch is not None:
            self._cancel_watch.cancel()

    async def _move(self, placement: Placement) -> None:
        """Raise Moved once another verifier has what a draining one still has.

        Where no other verifier takes the sessions, they go on where they are.
        """
        began = time.monotonic()
        plan = self._plan(placement.epoch, recovered=True, moving=True)
        try:
            async with asyncio.timeout(MOVE_S):
                if await self._ledger.is_cancelled(self._request.key, placement.epoch, self._request.mark):
                    placement.cancel_soon()
                    return
                moved = await self._open(plan, Whereabouts())
        except (OutriderError, TimeoutError) as error:
            fields = {"session": self._request.key.session, "peer": placement.link.address, "why": str(error)}
            log.info("not handed over", extra={"fields": fields})
            return
        for delivery in self._unfinished.values():
            delivery.lost()
        raise Moved(moved, time.monotonic() - began)

    def _take(self, choice: int, committed: verifier_pb2.Committed, placement: Placement) -> list[Event]:
        """Turn a verifier's message into events for the client."""
        _raise_for(committed)
        delivery = self._unfinished[choice]
        events: list[Event] = []
        prompt = 0
        if self._request.score_prompt:  # the prompt's own tokens come first
            prompt = min(len(committed.ids), max(0, len(self._request.ids) - committed.position))
        if prompt and (scores := delivery.take_scores(committed.position, committed.logprobs)):
            events.append(PromptScored(choice, scores))
        delta = delivery.take(
            committed.position + prompt,
            tuple(committed.ids[prompt:]),
            committed.token_sources[prompt:].translate(self._indices),
            committed.logprobs,
        )
        delivery.costs(committed.rounds, committed.admitted)
        if delta is not None:
            self._ledger.grew(self._request.key)
            events.append(Delivered(choice, delta, placement.epoch))
        reason = finish_from_wire(committed.finished)
        if reason is not None:
            finished = self._finished(choice, reason, committed.usage, committed.message, committed.code)
            events.append(finished)
        return events

    def _finished(
        self, choice: int, reason: FinishReason, last: common_pb2.Usage, message: str = "", code: int = 0
    ) -> Finished:
        """End a choice; `last` is the usage that its last verifier reported."""
        delivery = self._unfinished.pop(choice)
        usage = delivery.usage(last, self._source_names)
        accepted = usage.accepted_by_source
        self._fleet.drafted(self.target, (it for it in self.sources if accepted.get(it.name, 0)))
        # Nothing says which verifiers decoded the tokens that the client had already.
        usage.replay_identical &= len(self._numerics) == 1 and self._request.have is None
        return Finished(choice, reason, usage, delivery.finish(reason), message, code)

    def _cancelled(self) -> list[Event]:
        """End all choices as cancelled while no verifier has them."""
        self._ended_lost = True
        criterion = self._request.speculation.criterion
        promise = Promise.SAME_IDS if criterion is None else criterion.promise
        last = common_pb2.Usage(prompt_tokens=len(self._request.ids), promise=promise_to_wire(promise))
        events: list[Event] = []
        for choice in list(self._unfinished):
            finished = self._finished(choice, FinishReason.CANCELLED, last)
            finished.usage.recoveries -= 1  # of the last loss, after which the choice went on nowhere
            events.append(finished)
        return events

    def _generated(self) -> dict[int, list[int]]:
        """Generated token ids that the client has, by choice; the lists grow."""
        return {choice: delivery.ids for choice, delivery in self._unfinished.items()}

    def _plan(self, epoch: int, *, recovered: bool, moving: bool = False) -> OpenPlan:
        """The choices as they are to be opened now."""
        scoring = frozenset(choice for choice, it in self._unfinished.items() if it.scoring)
        return OpenPlan(self._generated(), epoch, recovered, moving, scoring)

    async def _open(self, plan: OpenPlan, known: Whereabouts) -> Placement:
        """Open the request on the first verifier that takes it, or raise the last verifier's error.

        A verifier that is too old for the request is passed over. Where all are, a new request is refused,
        and one that was decoded before waits for another verifier.
        """
        name = self.target.name
        refusal: OutriderError | None = None
        older: OlderVerifier | None = None
        if (instead := self.sources_instead()) != self.sources:
            self.use(instead)
        numerics = next(iter(self._numerics)) if len(self._numerics) == 1 else ""
        links = self._fleet.verifiers_for(
            name,
            known.verifier,
            known.near,
            like=self.target,
            numerics=numerics,
            limit=self._request.limit,
        )
        for link in links:
            try:
                placement = await self._opener.open(link, self.sources, plan, self._deadline.time_left())
                self.epoch = placement.epoch
                self._numerics.add(link.numerics)
                return placement
            except DeadlineExceeded:
                raise
            except (Unavailable, Overloaded) as error:
                log.info("not opened", extra={"fields": {"peer": link.address, "why": peer_text(str(error))}})
                refusal = error
            except OlderVerifier as error:
                log.info("passed over", extra={"fields": {"peer": link.address, "why": str(error)}})
                older = error
        if refusal is None and older is not None:
            raise Unavailable(str(older)) if plan.recovered else InvalidRequest(str(older))
        if isinstance(refusal, Overloaded):
            raise refusal
        # Why is in the log: what the transport says names the verifier's address.
        why = "can be reached" if refusal is None else "takes the request now"
        raise Unavailable(f"no verifier of model {name!r} {why}; retry") from refusal

    async def _recover(self, placement: Placement, lost: VerifierLost) -> Placement | None:
        """Open the request on another verifier as soon as one takes it; None once it is cancelled.

        Until then the request is on record without a verifier, so that a Cancel at any orchestrator finds it.
        Raises Unavailable where none takes it in time, and the error that ended the request meanwhile.
        """
        fields = {"session": self._request.key.session, "peer": placement.link.address, "why": str(lost)}
        log.warning("session lost its verifier", extra={"fields": fields})
        for delivery in self._unfinished.values():
            delivery.lost()
        self._ledger.lost(self._request.key, placement.epoch)
        named = self._request.key, placement.epoch, self._request.mark
        self._state.recovers = True
        try:
            if await self._ledger.is_cancelled(*named):
                self._state.cancelled = True
            async with self._state.heeding(partial(self._ledger.cancel_of, *named)):
                return await self._open_elsewhere(placement)
        finally:
            self._state.recovers = False

    async def _open_elsewhere(self, placement: Placement) -> Placement | None:
        """`_recover`, once the loss is on record."""
        pauses = RecoveryPauses(self._deadline)
        while True:
            if self._state.error is not None:
                raise self._state.error
            if self._state.cancelled:
                return None
            try:
                plan = self._plan(placement.epoch, recovered=True)
                return await self._open(plan, Whereabouts())
            except DeadlineExceeded:
                raise
            except (Unavailable, Overloaded) as refusal:
                pause_s = pauses.next_s()
                if pause_s is None and not self._state.cancelled:
                    raise Unavailable(f"the request lost its verifier; since then: {refusal}") from refusal
            await self._pause(pause_s or 0.0)

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until the request is cancelled or ended."""
        over = asyncio.Event()
        self._state.attach(lambda _: over.set())
        self._state.when_cancelled(over.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await over.wait()


def _text_of(request: AdmittedRequest, target: TargetModel) -> TextStream | None:
    """The text stream of one choice; None where the target has no tokenizer.

    Ids that end the request have no text, even where they are ordinary tokens such as a newline: a grammar
    and the stop strings do not see their bytes either.
    """
    tokens, params = target.tokens, request.params
    if tokens is None:
        return None
    silent, shown = params.end_ids(target.eos_ids), request.shown_ids

    def bytes_of(id_: int) -> bytes:
        if id_ in silent:
            return b""
        return tokens.token(id_).encode() if id_ in shown else tokens.token_bytes(id_)

    return TextStream(bytes_of, stop_bytes(request.stops), params.min_tokens)


def _raise_for(committed: verifier_pb2.Committed) -> None:
    """Raise the error that a message reports, if any.

    The failure of one session comes as a finish instead.
    """
    if committed.code == CommittedCode.UNKNOWN_SESSION:
        why = committed.message or "it was started anew"
        raise VerifierLost(f"the verifier lost the session ({why})")
    if committed.code == CommittedCode.TAKEN_OVER:
        raise Superseded(committed.message or "a later request took over the session")
    if committed.code and not committed.finished:
        raise OutriderError(f"the verifier: {committed.message} (status {committed.code})")
