"""All requests that this orchestrator answers now; a later request for a session ends the earlier one."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.placement import ChosenSource
from orchestrator.fleet.target_model import TargetModel
from orchestrator.fleet.verifier_link import VerifierLink
from orchestrator.relay.delivery import Event, Started
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.opener import Opener
from orchestrator.relay.opening_turns import OpeningTurns
from orchestrator.relay.relayed_request import RelayedRequest
from orchestrator.relay.request_state import RequestDeadline, RequestState
from orchestrator.relay.source_mover import SourceMover
from orchestrator.store.ledger import Ledger, Whereabouts
from outrider.wire.codec import SessionKey
from outrider.wire.names import EDGE, MAX_SOURCES
from outrider.wire.status import peer_text
from speculative.errors import DeadlineExceeded, OutriderError, StaleEpoch, Superseded, Unavailable

log = logging.getLogger(__name__)


class Relay:
    """Answers admitted requests; each call of `answer` takes one.

    Args:
        patience_s: how long a request without a deadline that lost its verifier waits for another.
        edge: host:port at which verifiers find the drafts of clients' devices; empty: no device drafts here.
    """

    def __init__(
        self, fleet: Fleet, ledger: Ledger, epochs: Epochs, patience_s: float, edge: str = ""
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._epochs = epochs
        self._patience_s = patience_s
        self._edge = edge
        self._running: dict[SessionKey, RequestState] = {}
        self._mover = SourceMover()
        self._turns: dict[str, OpeningTurns] = {}
        """By the model's name: what holds one model's requests up is no reason to wait at another."""

    def start(self) -> None:
        """Begin to replace sources that are lost."""
        self._mover.start()

    async def stop(self) -> None:
        """Stop replacing sources."""
        await self._mover.stop()

    async def answer(
        self, request: AdmittedRequest, target: TargetModel, time_left: float | None
    ) -> AsyncGenerator[Event, None]:
        """The request's events; see RelayedRequest.events. Raises OutriderError."""
        deadline = RequestDeadline(time.monotonic, time_left, self._patience_s)
        sources = self._sources(request, target)
        state = self._take_over(request.key)
        self._fleet.count_sessions(sources, request.choices)
        opener = Opener(self._ledger, self._epochs, state, request, target)
        relayed = RelayedRequest(self._fleet, opener, self._ledger, deadline, request, target, sources, state)
        self._mover.add(relayed)
        come = asyncio.Event()
        turn = self._turns_of(target.name).enter(request.key.tenant, request.choices, come.set)
        known: Whereabouts | None = None
        try:
            known = await self._begun(come, opener, state, deadline, request, target.name)
            state.cancelled = state.cancelled or known.cancelled
            async with aclosing(relayed.events(known)) as events:
                async for event in events:
                    if not isinstance(event, Started):
                        turn.opened()
                    yield event
        finally:
            turn.leave()
            self._mover.drop(relayed)
            relayed.use(())
            if known is not None and opener.first and not relayed.epoch:
                self._end_earlier(request.key, known, opener.first)
            if self._running.get(request.key) is state:
                del self._running[request.key]
            if relayed.ended or not request.resumable or not relayed.epoch:
                self._ledger.ended(request, target.name, opener.recorded, whole=relayed.is_kept)
            else:
                self._ledger.left(request.key, opener.recorded)

    async def cancel(self, key: SessionKey) -> bool:
        """End the session's current request, here or where the record has it; False if none was running."""
        state = self._running.get(key)
        ends_here = state is not None and state.recovers
        if state is not None:
            state.cancel()
        record = await self._ledger.cancel(key)
        if ends_here:  # the verifier on record is lost, and would not answer
            return True
        link = self._fleet.verifiers.get(record.verifier) if record is not None else None
        if record is None or link is None:
            waits = record is not None and not record.verifier and not record.cancelled
            return state is not None or waits
        keys = [key._replace(choice=choice) for choice in range(record.choices)]
        found = await asyncio.gather(*(_cancel(link, choice, record.epoch) for choice in keys))
        return (any(found) and not record.cancelled) or state is not None

    def end_all(self, error: OutriderError) -> None:
        """Give every client this error in place of all further tokens."""
        for state in self._running.values():
            state.end(error)

    def _turns_of(self, model: str) -> OpeningTurns:
        if model not in self._turns:
            self._turns[model] = OpeningTurns(lambda: self._fleet.open_verifiers(model), time.monotonic)
        return self._turns[model]

    async def _begun(
        self,
        come: asyncio.Event,
        opener: Opener,
        state: RequestState,
        deadline: RequestDeadline,
        request: AdmittedRequest,
        model: str,
    ) -> Whereabouts:
        """Where the session is known to be, once the request may begin.

        Raises the error that ended the request meanwhile.
        """
        if come.is_set() or request.have is not None:  # a request that resumes is on record already
            await _wait_for(come, state, deadline)
            return await self._ledger.whereabouts(request, model)
        known = await self._ledger.whereabouts(request, model)  # before the record says something else
        opener.heard_of(known.epoch)  # or a record of a clock ahead of this one would stay
        epoch = opener.waits()
        begins = False
        try:
            async with state.heeding(partial(self._ledger.cancel_of, request.key, epoch, request.mark)):
                await _wait_for(come, state, deadline)
            state.cancelled |= await self._ledger.is_cancelled(request.key, epoch, request.mark)
            begins = come.is_set() and not state.cancelled
        finally:
            if not begins:
                self._end_earlier(request.key, known, epoch)
        return known

    def _end_earlier(self, key: SessionKey, known: Whereabouts, epoch: int) -> None:
        """End the session's earlier request, after a request that was never opened has replaced it on record.

        A Cancel finds only the request on record, so no Cancel would end the earlier request.

        Args:
            epoch: the epoch of the request that was never opened.
        """
        if (link := self._fleet.verifiers.get(known.verifier)) is not None:
            for choice in range(known.choices):
                link.cancel_soon(key._replace(choice=choice), epoch)

    def _sources(self, request: AdmittedRequest, target: TargetModel) -> tuple[ChosenSource, ...]:
        """The sources that draft for a new request. Raises InvalidRequest for a name that no source has."""
        asked = request.speculation
        wanted = tuple(name for name in asked.sources if name != EDGE) if request.device else asked.sources
        sources = self._fleet.sources_for(target, wanted, tenant=request.key.tenant, given=request.given)
        if not asked.enabled:
            return ()
        if not request.device:
            return sources
        others = sources if wanted or not asked.sources else ()  # a request may want its device alone
        return (*others[: MAX_SOURCES - 1], ChosenSource(EDGE, self._edge))

    def _take_over(self, key: SessionKey) -> RequestState:
        """The state of a new request for this session; an earlier request ends."""
        if (earlier := self._running.get(key)) is not None:
            earlier.end(Superseded(f"a later request took over session {key.session!r}"))
        state = self._running[key] = RequestState(earlier)
        return state


async def _wait_for(turn: asyncio.Event, state: RequestState, deadline: RequestDeadline) -> None:
    """Return once the request may begin or was cancelled.

    Raises the error that ended it meanwhile, and DeadlineExceeded once its time is over: an Open sent as late
    as that may still reach the verifier, and would take the session from its earlier request for nothing.
    """
    state.attach(lambda _: turn.set())
    state.when_cancelled(turn.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline.time_left()):
            await turn.wait()
    if state.error is not None:
        raise state.error
    if not turn.is_set():
        raise DeadlineExceeded("the request's time limit was over before its turn came; allow more time")


async def _cancel(link: VerifierLink, key: SessionKey, epoch: int) -> bool:
    """End one session at its verifier; returns whether it was running. Raises Unavailable."""
    try:
        return await link.cancel(key, epoch)
    except StaleEpoch:  # a later request has the session, and that one was not to be cancelled
        return False
    except Unavailable as error:
        # What the transport says names the verifier's address, which is none of the client's business.
        fields = {"session": key.session, "peer": link.address, "why": peer_text(str(error))}
        log.info("not cancelled", extra={"fields": fields})
        raise Unavailable("the session's verifier cannot be reached; try again") from error
