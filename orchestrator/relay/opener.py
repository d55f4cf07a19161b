"""Opens all choices of a request on one verifier, under one epoch, and reads them together.

Knows nothing of which verifier is best, nor of what becomes of the tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from orchestrator.fleet.placement import ChosenSource
from orchestrator.fleet.reader import Reader
from orchestrator.fleet.verifier_link import VerifierLink
from orchestrator.front.admission import Admitted, Target
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.request_state import Running
from orchestrator.store import SessionRecord
from orchestrator.store.ledger import Ledger
from outrider.v1 import verifier_pb2
from outrider.wire.codec import (
    SessionKey,
    grammar_to_wire,
    key_from_wire,
    key_to_wire,
    logprobs_to_wire,
    sampling_to_wire,
)
from speculative.errors import InvalidRequest, OutriderError, StaleEpoch, Superseded

OPEN_S = 10.0
OPEN_ATTEMPTS = 3
CHANGE_S = 1.0
DEADLINE_MARGIN_MS = 250
"""The verifier's own deadline is a backstop for an orchestrator that is gone: later than the request's, at
which this process cancels it."""
MAX_MS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request's sessions were opened."""

    link: VerifierLink
    epoch: int
    keys: tuple[SessionKey, ...]
    source_names: tuple[str, ...]

    def read(self, positions: Mapping[int, int]) -> "Readers":
        """Readers of all of them, each from its choice's position on; to be left."""
        return Readers(self, positions)

    def cancel_soon(self) -> None:
        """End them all, with nobody waiting."""
        for key in self.keys:
            self.link.cancel_soon(key, self.epoch)


class HandedOver(Exception):
    """Another verifier has the sessions, at `place`."""

    def __init__(self, place: Place, took_s: float) -> None:
        super().__init__(place.link.address)
        self.place = place
        self.took_s = took_s


@dataclass(frozen=True, slots=True)
class Begun:
    """Which choices are to be opened, and what they have already."""

    ids: Mapping[int, Sequence[int]]
    """Generated ids by choice."""
    epoch: int = 0
    """The highest that was seen of the session; 0: it is new."""
    recovered: bool = False
    """Whether a verifier had admitted it."""
    moving: bool = False
    """Whether one still has it, until another has it too."""


class Readers:
    """The readers of a request's choices that have not ended yet."""

    def __init__(self, place: Place, positions: Mapping[int, int]) -> None:
        self._link = place.link
        self._wake = asyncio.Event()
        self._readers: dict[int, Reader] = {
            key.choice: place.link.read(key, place.epoch, positions[key.choice], self._wake)
            for key in place.keys
        }

    def __bool__(self) -> bool:
        return bool(self._readers)

    def __contains__(self, choice: int) -> bool:
        return choice in self._readers

    def fail(self, error: OutriderError) -> None:
        """Nothing more will come of any."""
        for reader in self._readers.values():
            reader.fail(error)

    async def take(self) -> list[tuple[int, verifier_pb2.Committed]]:
        """All that has come since the last call, by choice, waiting for the first.

        Raises what one of them failed with, once all that came before it is taken.
        """
        await self._wake.wait()
        self._wake.clear()
        readers = self._readers.items()
        arrived = [(choice, committed) for choice, reader in readers for committed in reader.take()]
        error = next((reader.error for _, reader in readers if reader.error is not None), None)
        if error is not None:
            self._wake.set()
            if not arrived:
                raise error
        return arrived

    def urged(self) -> bool:
        """Whether they were urged to go elsewhere since the last call."""
        readers = self._readers.values()
        urged = any(reader.urged for reader in readers)
        for reader in readers:
            reader.urged = False
        return urged

    def ended(self, choice: int) -> None:
        """Nothing more is read of this choice."""
        self._link.leave(self._readers.pop(choice))

    def let_go(self) -> None:
        """Reads no longer; what has not ended goes on for a while, and then waits for a reader."""
        for reader in self._readers.values():
            self._link.leave(reader)
        self._readers.clear()

    def leave(self) -> None:
        """Reads no longer, and ends what has not ended."""
        for reader in self._readers.values():
            self._link.leave(reader)
            self._link.cancel_soon(reader.key, reader.epoch)
        self._readers.clear()


class Opener:
    """Opens one request, wherever it comes to be, and keeps the record of where."""

    def __init__(self, ledger: Ledger, epochs: Epochs, running: Running) -> None:
        self._ledger = ledger
        self._epochs = epochs
        self._running = running
        self.first = 0
        """The first under which it was opened, or may have been; a Cancel from there on is its own."""

    def heard_of(self, epoch: int) -> None:
        """The session is on record under this one: a hint, so one that nobody could go above is no reason to
        end."""
        if self._epochs.passes(epoch):
            self._running.epoch = max(self._running.epoch, epoch)

    async def open(
        self,
        link: VerifierLink,
        request: Admitted,
        target: Target,
        sources: Sequence[ChosenSource],
        begun: Begun,
        time_left: float | None,
    ) -> Place:
        """The choices that `begun` names, under a new epoch above all known ones. Raises OutriderError, that
        which the request was ended with included.

        What one verifier said of the session counts at the next one, too, which may never have heard of it.
        """
        messages = [
            _open_message(request, choice, ids, target, sources, time_left, begun.recovered)
            for choice, ids in begun.ids.items()
        ]
        timeout_s = OPEN_S if time_left is None else min(OPEN_S, time_left)
        known = max(begun.epoch, self._running.epoch)
        epoch = self._above(known, request) if known else self._epochs.next()
        for _ in range(OPEN_ATTEMPTS):
            self._running.opens(epoch)
            self.first = self.first or epoch
            for message in messages:
                message.epoch = epoch
            try:
                with link.opening(len(messages)):
                    return await self._attempt(link, request, begun, messages, timeout_s)
            except StaleEpoch as error:
                self.first = 0 if self.first == epoch else self.first
                epoch = self._above(error.highest, request)
        raise Superseded(f"others keep taking session {request.key.session!r}; end them, or use another name")

    async def change_sources(
        self,
        place: Place,
        request: Admitted,
        target: Target,
        sources: Sequence[ChosenSource],
        ids: Mapping[int, Sequence[int]],
    ) -> None:
        """Has the choices in `ids` drafted for by these, where they are and as they stand. Raises
        OutriderError."""
        messages = [
            _open_message(request, choice, generated, target, sources, None, True)
            for choice, generated in ids.items()
        ]
        for message in messages:
            message.epoch = place.epoch
        await asyncio.gather(*(place.link.open(message, CHANGE_S) for message in messages))

    def _above(self, highest: int, request: Admitted) -> int:
        try:
            return self._epochs.above(highest)
        except InvalidRequest as error:
            raise Superseded(f"session {request.key.session!r} cannot be taken over: {error}") from error

    async def _attempt(
        self,
        link: VerifierLink,
        request: Admitted,
        begun: Begun,
        messages: Sequence[verifier_pb2.OpenRequest],
        timeout_s: float,
    ) -> Place:
        epoch = messages[0].epoch
        keys = [key_from_wire(message.key) for message in messages]
        record = SessionRecord(request.key, epoch, link.address, request.choices, request=request.mark)
        lifts = self.first if request.have is None else 0
        if not begun.moving:
            self._ledger.opened(record, lifts, dict(begun.ids))
        stale: set[SessionKey] = set()
        try:
            answers = await asyncio.gather(
                *(link.open(message, timeout_s) for message in messages), return_exceptions=True
            )
            stale = {key for key, it in zip(keys, answers, strict=True) if isinstance(it, StaleEpoch)}
            opened = [it for it in answers if not isinstance(it, BaseException)]
            if len(opened) < len(messages):
                _raise_first([it for it in answers if isinstance(it, BaseException)])
        except BaseException:
            for key in keys:
                if key not in stale:  # it may have been opened all the same
                    link.cancel_soon(key, epoch)
            if not begun.moving:
                self._ledger.ended(request, messages[0].model, epoch, whole=False)
            raise
        if begun.moving:
            self._ledger.opened(record, lifts, dict(begun.ids))
        return Place(link, epoch, tuple(keys), tuple(opened[0].source_names))


def _raise_first(errors: Sequence[BaseException]) -> NoReturn:
    """The highest epoch of those that were too low, so that the next is above all; else the first error."""
    stale = [error for error in errors if isinstance(error, StaleEpoch)]
    raise max(stale, key=lambda error: error.highest) if stale else errors[0]


def _open_message(
    request: Admitted,
    choice: int,
    generated: Sequence[int],
    target: Target,
    sources: Sequence[ChosenSource],
    time_left: float | None,
    recovered: bool,
) -> verifier_pb2.OpenRequest:
    """All but the epoch."""
    left_ms = 0 if time_left is None else min(MAX_MS, int(time_left * 1000) + DEADLINE_MARGIN_MS)
    return verifier_pb2.OpenRequest(
        key=key_to_wire(request.keys[choice]),
        model=target.name,
        ids=[*request.ids, *generated],
        prompt_length=len(request.ids),
        limit=request.limit,
        sampling=sampling_to_wire(request.params),
        seed=request.seed_of(choice),
        stop=request.stops,
        time_left_ms=left_ms,
        speculate=request.speculation.enabled,
        node_limit=request.speculation.node_limit,
        sources=[verifier_pb2.Source(name=source.name, address=source.address) for source in sources],
        logprobs=None if request.logprobs is None else logprobs_to_wire(request.logprobs),
        recovered=recovered,
        grammar=None if request.grammar is None else grammar_to_wire(request.grammar),
        learn=request.speculation.learn,
        corpora=request.speculation.corpora,
        prediction=request.speculation.prediction if request.speculation.enabled else (),
    )
