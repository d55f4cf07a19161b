"""The way of one admitted request: open it on a verifier, pass on what is committed, end it everywhere.

Knows nothing of how a request was asked for, nor of the stream it is answered on.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from orchestrator.epochs import Epochs
from orchestrator.fleet import Fleet
from orchestrator.placement import ChosenSource
from orchestrator.reader import Reader
from orchestrator.requests import Admitted, Target
from orchestrator.sessions import Delivery, Delta
from orchestrator.stores import SessionRecord, SessionStore
from orchestrator.verifiers import VerifierLink
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import SessionKey, finish_from_wire, key_to_wire, sampling_to_wire
from speculative.commit import FinishReason, stop_bytes
from speculative.errors import OutriderError, Overloaded, StaleEpoch, Superseded, Unavailable
from speculative.text import TextStream

log = logging.getLogger(__name__)

OPEN_S = 10.0
OPEN_ATTEMPTS = 3
DEADLINE_MARGIN_MS = 250
"""The verifier's own deadline is a backstop for an orchestrator that is gone: later than the request's, at
which this process cancels it."""
MAX_MS = 2**32 - 1
UNKNOWN_SESSION, TAKEN_OVER = 5, 10
"""gRPC status codes in Committed.code."""


@dataclass(frozen=True, slots=True)
class Started:
    """The session is open."""

    epoch: int
    source_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The session has ended."""

    reason: FinishReason
    usage: common_pb2.Usage
    text: str
    """What was held back and is no stop string."""
    message: str


Event = Started | Delta | Finished


class Running:
    """A request that is being answered here, as later calls for its session see it."""

    def __init__(self) -> None:
        self.cancelled = False
        self.error: OutriderError | None = None
        self._reader: Reader | None = None

    def end(self, error: OutriderError) -> None:
        """The client gets this error in place of what is still to come."""
        self.error = error
        if self._reader is not None:
            self._reader.fail(error)

    def reads(self, reader: Reader) -> None:
        """From now on `end` reaches it."""
        self._reader = reader
        if self.error is not None:
            reader.fail(self.error)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a session was opened."""

    link: VerifierLink
    epoch: int
    source_names: tuple[str, ...]


class Relay:
    """Answers admitted requests, one `answer` each; a later one for the same session ends the earlier."""

    def __init__(self, fleet: Fleet, store: SessionStore, epochs: Epochs) -> None:
        self._fleet = fleet
        self._store = store
        self._epochs = epochs
        self._running: dict[SessionKey, Running] = {}

    async def answer(
        self, request: Admitted, target: Target, time_left: float | None
    ) -> AsyncGenerator[Event, None]:
        """Started, then deltas, then Finished. Closing it early ends the session. Raises OutriderError."""
        sources = self._fleet.sources_for(target, request.speculation)
        running = self._take_over(request.key)
        self._fleet.count_session(sources, 1)
        try:
            place = await self._open(request, target, sources, time_left)
            async with aclosing(self._follow(request, target, place, running)) as events:
                async for event in events:
                    yield event
        finally:
            self._fleet.count_session(sources, -1)
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
        try:
            found = await link.cancel(key, record.epoch)
        except StaleEpoch:  # a later request has it, and that one is not what was to be cancelled
            found = False
        return found or running is not None

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
    ) -> _Place:
        """On the first verifier that takes it. Raises what the last one said where none does."""
        refusal: OutriderError = Unavailable(f"no verifier of model {target.name!r} can be reached; retry")
        for link in self._fleet.verifiers_for(target.name):
            try:
                return await self._open_on(link, request, target, sources, time_left)
            except (Unavailable, Overloaded) as error:
                log.info("not opened", extra={"fields": {"peer": link.address, "why": str(error)}})
                refusal = error
        raise refusal

    async def _open_on(
        self,
        link: VerifierLink,
        request: Admitted,
        target: Target,
        sources: Sequence[ChosenSource],
        time_left: float | None,
    ) -> _Place:
        """Under a new epoch, above the highest that the verifier knows."""
        message = _open_message(request, target, sources, time_left)
        timeout_s = OPEN_S if time_left is None else min(OPEN_S, time_left)
        for _ in range(OPEN_ATTEMPTS):
            message.epoch = self._epochs.next()
            try:
                return await self._attempt(link, request.key, message, timeout_s)
            except StaleEpoch as error:
                self._epochs.saw(error.highest)
        raise Superseded(f"others keep taking session {request.key.session!r}; end them, or use another name")

    async def _attempt(
        self, link: VerifierLink, key: SessionKey, message: verifier_pb2.OpenRequest, timeout_s: float
    ) -> _Place:
        await self._store.put(SessionRecord(key, message.epoch, link.address))
        try:
            response = await link.open(message, timeout_s)
        except BaseException as error:
            if not isinstance(error, StaleEpoch):  # it may have been opened all the same
                link.cancel_soon(key, message.epoch)
            await self._store.forget(key, message.epoch)
            raise
        return _Place(link, message.epoch, tuple(response.source_names))

    async def _follow(
        self, request: Admitted, target: Target, place: _Place, running: Running
    ) -> AsyncGenerator[Event, None]:
        """What the verifier commits, until it says why it ended."""
        reader = place.link.read(request.key, place.epoch, len(request.ids))
        running.reads(reader)
        ended = False
        try:
            if running.cancelled:
                place.link.cancel_soon(request.key, place.epoch)
            yield Started(place.epoch, place.source_names)
            delivery = Delivery(len(request.ids), _text_of(request, target))
            while not ended:
                for committed in await reader.take():
                    _raise_for(committed, place.link.address)
                    delta = delivery.take(committed.position, tuple(committed.ids), committed.credits)
                    if delta is not None:
                        yield delta
                    reason = finish_from_wire(committed.finished)
                    if reason is not None:
                        ended = True
                        text = delivery.finish(reason)
                        yield Finished(reason, committed.usage, text, committed.message)
        finally:
            place.link.leave(reader)
            if not ended:
                place.link.cancel_soon(request.key, place.epoch)
            await self._store.forget(request.key, place.epoch)


def _open_message(
    request: Admitted, target: Target, sources: Sequence[ChosenSource], time_left: float | None
) -> verifier_pb2.OpenRequest:
    """All but the epoch."""
    left_ms = 0 if time_left is None else min(MAX_MS, int(time_left * 1000) + DEADLINE_MARGIN_MS)
    return verifier_pb2.OpenRequest(
        key=key_to_wire(request.key),
        model=target.name,
        ids=request.ids,
        prompt_length=len(request.ids),
        limit=request.limit,
        sampling=sampling_to_wire(request.params),
        seed=request.seed,
        stop=request.stops,
        time_left_ms=left_ms,
        speculate=request.speculation.enabled,
        node_limit=request.speculation.node_limit,
        sources=[verifier_pb2.Source(name=source.name, address=source.address) for source in sources],
    )


def _text_of(request: Admitted, target: Target) -> TextStream | None:
    if target.tokens is None:
        return None
    return TextStream(target.tokens.token_bytes, stop_bytes(request.stops))


def _raise_for(committed: verifier_pb2.Committed, address: str) -> None:
    """The error that a message stands for, if any; a session that failed comes as a finish instead."""
    if committed.code == UNKNOWN_SESSION:
        why = committed.message or "it was started anew"
        raise Unavailable(f"verifier {address} lost the session ({why}); try again")
    if committed.code == TAKEN_OVER:
        raise Superseded(committed.message or "a later request took over the session")
    if committed.code and not committed.finished:
        raise OutriderError(f"verifier {address}: {committed.message} (status {committed.code})")
