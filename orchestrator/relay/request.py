"""The way of one admitted request: open it on a verifier, pass on what is committed, go on elsewhere where
the verifier is lost, end it everywhere.

Tokens are the truth: what the client has been given is all that another verifier needs to go on. Knows
nothing of how a request was asked for, nor of the stream it is answered on.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.placement import ChosenSource
from orchestrator.fleet.verifier_link import VerifierLost
from orchestrator.front.admission import Admitted, Target
from orchestrator.relay.delivery import Delivery
from orchestrator.relay.events import Delivered, Event, Finished, Recovered, Started
from orchestrator.relay.opener import Begun, HandedOver, Opener, Place
from orchestrator.relay.recovery import Clock, Pauses
from orchestrator.relay.request_state import Running
from orchestrator.store.ledger import Ledger, Whereabouts
from outrider.v1 import verifier_pb2
from outrider.wire.codec import finish_from_wire
from outrider.wire.status import peer_text
from speculative.commit import stop_bytes
from speculative.errors import OutriderError, Overloaded, Superseded, Unavailable
from speculative.text import TextStream

log = logging.getLogger(__name__)

UNKNOWN_SESSION, TAKEN_OVER = 5, 10
"""gRPC status codes in Committed.code."""
HAND_OVER_S = 2.0
"""How long a stream rests while another verifier is asked to go on with it."""


class Answer:
    """One request's events; `sources` are those it is given."""

    def __init__(
        self,
        fleet: Fleet,
        opener: Opener,
        ledger: Ledger,
        clock: Clock,
        request: Admitted,
        target: Target,
        sources: tuple[ChosenSource, ...],
        running: Running,
    ) -> None:
        self._fleet = fleet
        self._opener = opener
        self._ledger = ledger
        self._clock = clock
        self._request = request
        self._target = target
        self.sources = sources
        """Those that are to draft for it."""
        self._running = running
        self._place: Place | None = None
        self._heeding: asyncio.Task[None] | None = None
        self.epoch = 0
        """The latest under which it was opened; 0: none yet."""
        self._numerics: set[str] = set()  # of all verifiers that had it
        self._unfinished = {
            choice: Delivery(len(request.ids), _text_of(request, target), have)
            for choice, have in enumerate(request.have or ((),) * request.choices)
            if choice not in request.ended
        }

    @property
    def ended(self) -> bool:
        """Whether every choice has."""
        return not self._unfinished

    @property
    def target(self) -> Target:
        """The model that answers."""
        return self._target

    def use(self, sources: tuple[ChosenSource, ...]) -> None:
        """These are to draft for it from its next opening on, or as soon as its verifier is told."""
        self._fleet.count_sessions(self.sources, -self._request.choices)
        self._fleet.count_sessions(sources, self._request.choices)
        self.sources = sources

    async def tell_sources(self) -> None:
        """Its verifier, of the sources that it is to use. Raises OutriderError."""
        if self._place is not None:
            await self._opener.change_sources(
                self._place, self._request, self._target, self.sources, self._generated()
            )

    async def events(self, known: Whereabouts) -> AsyncGenerator[Event, None]:
        """Started, then what is delivered, then Finished for each choice.

        Closing it early ends all choices, or lets go of them where the request is resumable. Raises
        OutriderError.
        """
        resumes = self._request.have is not None
        self._opener.heard_of(known.epoch)
        place = await self._open(Begun(self._generated(), self._request.seen_epoch, resumes), known)
        news: Event = Started(place.epoch, place.source_names)
        try:
            async with aclosing(self._wherever(place, news)) as events:
                async for event in events:
                    yield event
        finally:
            if self._heeding is not None:
                self._heeding.cancel()

    async def _wherever(self, place: Place, news: Event) -> AsyncGenerator[Event, None]:
        """The news, then what comes of it at this place and at those that it goes on at."""
        while True:
            if place.epoch != self._opener.first:  # a Cancel may have gone to where it was before
                self._heeding = asyncio.create_task(self._heed_cancel(place), name="cancels")
            try:
                async with aclosing(self._read(place, news)) as events:
                    async for event in events:
                        yield event
                return
            except VerifierLost as lost:
                began = time.monotonic()
                place = await self._recover(place, lost)
                news = Recovered(time.monotonic() - began)
            except HandedOver as moved:
                place, news = moved.place, Recovered(moved.took_s)

    async def _read(self, place: Place, news: Event) -> AsyncGenerator[Event, None]:
        """The news, then what a verifier commits, until it says why the last choice ended."""
        readers = place.read({choice: delivery.position for choice, delivery in self._unfinished.items()})
        self._running.reads(readers)
        self._place = place
        try:
            if self._running.cancelled:
                place.cancel_soon()
            yield news
            while readers:
                for choice, committed in await readers.take():
                    if choice in readers:
                        for event in self._take(choice, committed, place):
                            if isinstance(event, Finished):
                                readers.ended(choice)
                            yield event
                if readers.urged():
                    await self._hand_over(place)
        except (GeneratorExit, asyncio.CancelledError):
            if self._request.resumable:
                readers.let_go()
            raise
        finally:
            self._place = None
            readers.leave()

    async def _heed_cancel(self, place: Place) -> None:
        """One that another orchestrator sent to where the session was, while it moved here."""
        if await self._ledger.was_cancelled_meanwhile(self._request.key, place.epoch):
            self._running.cancelled = True
            place.cancel_soon()

    async def _hand_over(self, place: Place) -> None:
        """Raises HandedOver once another verifier has what one that is about to end still has. Where none
        takes it, it goes on where it is."""
        began = time.monotonic()
        begun = Begun(self._generated(), place.epoch, recovered=True, moving=True)
        try:
            async with asyncio.timeout(HAND_OVER_S):
                if await self._ledger.is_cancelled(self._request.key, place.epoch, self._request.mark):
                    place.cancel_soon()
                    return
                moved = await self._open(begun, Whereabouts())
        except (OutriderError, TimeoutError) as error:
            fields = {"session": self._request.key.session, "peer": place.link.address, "why": str(error)}
            log.info("not handed over", extra={"fields": fields})
            return
        for delivery in self._unfinished.values():
            delivery.lost()
        raise HandedOver(moved, time.monotonic() - began)

    def _take(self, choice: int, committed: verifier_pb2.Committed, place: Place) -> list[Event]:
        """What the client is told of a message."""
        _raise_for(committed, place.link.address)
        delivery = self._unfinished[choice]
        events: list[Event] = []
        delta = delivery.take(committed.position, tuple(committed.ids), committed.credits, committed.logprobs)
        delivery.costs(committed.rounds, committed.admitted)
        if delta is not None:
            self._ledger.grew(self._request.key)
            events.append(Delivered(choice, delta, place.epoch))
        reason = finish_from_wire(committed.finished)
        if reason is not None:
            del self._unfinished[choice]
            usage = delivery.usage(committed.usage, place.source_names)
            # What the client had already came from nobody knows where.
            usage.replay_identical &= len(self._numerics) == 1 and self._request.have is None
            events.append(Finished(choice, reason, usage, delivery.finish(reason), committed.message))
        return events

    def _generated(self) -> dict[int, list[int]]:
        return {choice: delivery.ids for choice, delivery in self._unfinished.items()}

    async def _open(self, begun: Begun, known: Whereabouts) -> Place:
        """On the first verifier that takes it. Raises what the last one said where none does."""
        name = self._target.name
        refusal: OutriderError = Unavailable(f"no verifier of model {name!r} can be reached; retry")
        if (instead := self._fleet.sources_instead(self._target, self.sources)) != self.sources:
            self.use(instead)
        numerics = next(iter(self._numerics)) if len(self._numerics) == 1 else ""
        links = self._fleet.verifiers_for(
            name,
            known.verifier,
            known.near,
            like=self._target,
            numerics=numerics,
            limit=self._request.limit,
        )
        for link in links:
            try:
                place = await self._opener.open(
                    link,
                    self._request,
                    self._target,
                    self.sources,
                    begun,
                    self._clock.time_left(),
                )
                self.epoch = place.epoch
                self._numerics.add(link.numerics)
                return place
            except (Unavailable, Overloaded) as error:
                log.info("not opened", extra={"fields": {"peer": link.address, "why": peer_text(str(error))}})
                refusal = error
        raise refusal

    async def _recover(self, place: Place, lost: VerifierLost) -> Place:
        """Wherever a verifier is found in time. Raises Unavailable where none is, or why it is to end."""
        fields = {"session": self._request.key.session, "peer": place.link.address, "why": str(lost)}
        log.warning("session lost its verifier", extra={"fields": fields})
        for delivery in self._unfinished.values():
            delivery.lost()
        pauses = Pauses(self._clock)
        if await self._ledger.is_cancelled(self._request.key, place.epoch, self._request.mark):
            self._running.cancelled = True
        while True:
            if self._running.error is not None:
                raise self._running.error
            try:
                return await self._open(Begun(self._generated(), place.epoch, recovered=True), Whereabouts())
            except (Unavailable, Overloaded) as refusal:
                pause_s = pauses.next_s()
                if pause_s is None:
                    raise Unavailable(f"{lost}; since then: {refusal}") from refusal
            await asyncio.sleep(pause_s)


def _text_of(request: Admitted, target: Target) -> TextStream | None:
    tokens, params = target.tokens, request.params
    if tokens is None:
        return None
    silent = frozenset(params.stop_ids)
    return TextStream(
        lambda id_: b"" if id_ in silent else tokens.token_bytes(id_),
        stop_bytes(request.stops),
        params.min_tokens,
    )


def _raise_for(committed: verifier_pb2.Committed, address: str) -> None:
    """The error that a message stands for, if any; a session that failed comes as a finish instead."""
    if committed.code == UNKNOWN_SESSION:
        why = committed.message or "it was started anew"
        raise VerifierLost(f"verifier {address} lost the session ({why})")
    if committed.code == TAKEN_OVER:
        raise Superseded(committed.message or "a later request took over the session")
    if committed.code and not committed.finished:
        raise OutriderError(f"verifier {address}: {committed.message} (status {committed.code})")
