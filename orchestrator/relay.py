"""The way of one admitted request: open it on a verifier, pass on what is committed, end it everywhere.

Knows nothing of how a request was asked for, nor of the stream it is answered on.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from orchestrator.epochs import Epochs
from orchestrator.fleet import Fleet
from orchestrator.opening import Opener, Place, Readers
from orchestrator.placement import ChosenSource
from orchestrator.requests import Admitted, Target
from orchestrator.sessions import Delivery, Delta
from orchestrator.stores import SessionStore
from orchestrator.verifiers import VerifierLink
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import SessionKey, finish_from_wire
from outrider.wire.status import peer_text
from speculative.commit import FinishReason, stop_bytes
from speculative.errors import OutriderError, Overloaded, StaleEpoch, Superseded, Unavailable
from speculative.text import TextStream

log = logging.getLogger(__name__)

UNKNOWN_SESSION, TAKEN_OVER = 5, 10
"""gRPC status codes in Committed.code."""


@dataclass(frozen=True, slots=True)
class Started:
    """All choices are open."""

    epoch: int
    source_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """A choice has more."""

    choice: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice has ended."""

    choice: int
    reason: FinishReason
    usage: common_pb2.Usage
    text: str
    """What was held back and is no stop string."""
    message: str


Event = Started | Delivered | Finished


class Running:
    """A request that is being answered here, as later calls for its session see it."""

    def __init__(self) -> None:
        self.cancelled = False
        self.error: OutriderError | None = None
        self._readers: Readers | None = None

    def end(self, error: OutriderError) -> None:
        """The client gets this error in place of what is still to come."""
        self.error = error
        if self._readers is not None:
            self._readers.fail(error)

    def reads(self, readers: Readers) -> None:
        """From now on `end` reaches them."""
        self._readers = readers
        if self.error is not None:
            readers.fail(self.error)


class Relay:
    """Answers admitted requests, one `answer` each; a later one for the same session ends the earlier."""

    def __init__(self, fleet: Fleet, store: SessionStore, epochs: Epochs) -> None:
        self._fleet = fleet
        self._store = store
        self._opener = Opener(store, epochs)
        self._running: dict[SessionKey, Running] = {}

    async def answer(
        self, request: Admitted, target: Target, time_left: float | None
    ) -> AsyncGenerator[Event, None]:
        """Started, then what is delivered, then Finished for each choice.

        Closing it early ends all choices. Raises OutriderError.
        """
        sources = self._fleet.sources_for(target, request.speculation)
        running = self._take_over(request.key)
        self._fleet.count_sessions(sources, request.choices)
        try:
            place = await self._open(request, target, sources, time_left)
            async with aclosing(self._follow(request, target, place, running)) as events:
                async for event in events:
                    yield event
        finally:
            self._fleet.count_sessions(sources, -request.choices)
            if self._running.get(request.key) is running:
                del self._running[request.key]

    async def cancel(self, key: SessionKey) -> bool:
        """End the session's current request; whether one was running."""
        running = self._running.get(key)
        if running is not None:
            running.cancelled = True
        record = await self._store.find(key)
        link = self._fleet.verifiers.get(record.verifier) if record is not None else None
        if record is None or link is None:
            return running is not None
        keys = [key._replace(choice=choice) for choice in range(record.choices)]
        found = await asyncio.gather(*(_cancelled(link, choice, record.epoch) for choice in keys))
        return any(found) or running is not None

    def end_all(self, error: OutriderError) -> None:
        """Every client gets this error in place of what is still to come."""
        for running in self._running.values():
            running.end(error)

    def _take_over(self, key: SessionKey) -> Running:
        if (earlier := self._running.get(key)) is not None:
            earlier.end(Superseded(f"a later request took over session {key.session!r}"))
        running = self._running[key] = Running()
        return running

    async def _open(
        self, request: Admitted, target: Target, sources: Sequence[ChosenSource], time_left: float | None
    ) -> Place:
        """On the first verifier that takes it. Raises what the last one said where none does."""
        refusal: OutriderError = Unavailable(f"no verifier of model {target.name!r} can be reached; retry")
        for link in self._fleet.verifiers_for(target.name):
            try:
                return await self._opener.open(link, request, target, sources, time_left)
            except (Unavailable, Overloaded) as error:
                log.info("not opened", extra={"fields": {"peer": link.address, "why": peer_text(str(error))}})
                refusal = error
        raise refusal

    async def _follow(
        self, request: Admitted, target: Target, place: Place, running: Running
    ) -> AsyncGenerator[Event, None]:
        """What the verifier commits, until it says why the last choice ended."""
        readers = place.read(len(request.ids))
        running.reads(readers)
        try:
            if running.cancelled:
                place.cancel_soon()
            yield Started(place.epoch, place.source_names)
            deliveries = [Delivery(len(request.ids), _text_of(request, target)) for _ in place.keys]
            while readers:
                for choice, committed in await readers.take():
                    if choice not in readers:
                        continue
                    _raise_for(committed, place.link.address)
                    delivery = deliveries[choice]
                    delta = delivery.take(
                        committed.position, tuple(committed.ids), committed.credits, committed.logprobs
                    )
                    if delta is not None:
                        yield Delivered(choice, delta)
                    reason = finish_from_wire(committed.finished)
                    if reason is not None:
                        readers.ended(choice)
                        text = delivery.finish(reason)
                        yield Finished(choice, reason, committed.usage, text, committed.message)
        finally:
            readers.leave()
            await self._store.forget(request.key, place.epoch)


async def _cancelled(link: VerifierLink, key: SessionKey, epoch: int) -> bool:
    """Whether a session was running, and is ended now."""
    try:
        return await link.cancel(key, epoch)
    except StaleEpoch:  # a later request has it, and that one is not what was to be cancelled
        return False


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
        raise Unavailable(f"verifier {address} lost the session ({why}); try again")
    if committed.code == TAKEN_OVER:
        raise Superseded(committed.message or "a later request took over the session")
    if committed.code and not committed.finished:
        raise OutriderError(f"verifier {address}: {committed.message} (status {committed.code})")
