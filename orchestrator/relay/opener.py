"""Opens all choices of a request on one verifier, under one epoch.

Records where the choices are, and reads them together.

Knows nothing of which verifier is best, nor of what becomes of the tokens.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from orchestrator.admitted_request import AdmittedRequest
from orchestrator.fleet.placement import ChosenSource, sources_at
from orchestrator.fleet.target_model import TargetModel
from orchestrator.fleet.verifier_link import SessionReader, VerifierLink
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.request_state import RequestState
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
from outrider.wire.criteria import criterion_to_wire
from outrider.wire.incoming.request_fields import unknown_field
from speculative.errors import DeadlineExceeded, InvalidRequest, OutriderError, StaleEpoch, Superseded

OPEN_S = 10.0
OPEN_ATTEMPTS = 3
CHANGE_S = 1.0
DEADLINE_MARGIN_MS = 250
"""How much later than the request's deadline its verifier's own deadline is. That one is a backstop for an
orchestrator that is gone; this process cancels at the request's deadline."""
MAX_MS = 2**32 - 1


class OlderVerifier(InvalidRequest):
    """The verifier is too old to know a field of the request, and would ignore it; others may know it."""


class ChoiceReaders:
    """Readers of a request's choices that have not ended yet, all on one verifier under one epoch.

    Args:
        positions: by choice, where its client's tokens end, prompt included.
        interval_ms: least milliseconds between two messages of a choice; 0: a message a round.
    """

    def __init__(
        self,
        link: VerifierLink,
        keys: Sequence[SessionKey],
        epoch: int,
        positions: Mapping[int, int],
        interval_ms: int,
    ) -> None:
        self._link = link
        self._wake = asyncio.Event()
        self._readers: dict[int, SessionReader] = {
            key.choice: link.read(key, epoch, positions[key.choice], self._wake, interval_ms) for key in keys
        }

    def __bool__(self) -> bool:
        return bool(self._readers)

    def __contains__(self, choice: int) -> bool:
        return choice in self._readers

    def fail(self, error: OutriderError) -> None:
        """End the readers of all choices with this error."""
        for reader in self._readers.values():
            reader.fail(error)

    async def take(self) -> list[tuple[int, verifier_pb2.Committed]]:
        """Take all messages since the last call, each with its choice; waits for the first.

        Raises the error of a reader that failed, once all messages before it are taken.
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

    def take_urge(self) -> bool:
        """Whether the verifier asked for the sessions to be moved, since this was called last."""
        readers = self._readers.values()
        urged = any(reader.should_move for reader in readers)
        for reader in readers:
            reader.should_move = False
        return urged

    def end(self, choice: int) -> None:
        """Stop reading a choice that has ended."""
        self._link.leave(self._readers.pop(choice))

    def detach(self) -> None:
        """Stop reading, and let the sessions decode on until a reader comes back or their time is over."""
        for reader in self._readers.values():
            self._link.leave(reader)
        self._readers.clear()

    def cancel(self) -> None:
        """Stop reading, and end the sessions that have not ended."""
        for reader in self._readers.values():
            self._link.leave(reader)
            self._link.cancel_soon(reader.key, reader.epoch)
        self._readers.clear()


@dataclass(frozen=True, slots=True)
class Placement:
    """The verifier and the epoch that a request's sessions were opened with."""

    link: VerifierLink
    epoch: int
    keys: tuple[SessionKey, ...]
    source_names: tuple[str, ...]
    """Names of the sources that draft for them, in the verifier's order."""

    def read(self, positions: Mapping[int, int], interval_ms: int) -> ChoiceReaders:
        """Readers of all sessions, each from its choice's position on; see `ChoiceReaders`."""
        return ChoiceReaders(self.link, self.keys, self.epoch, positions, interval_ms)

    def indices_as(self, told: Sequence[str]) -> bytes:
        """Table for `bytes.translate` from this verifier's source indices to those of the names in `told`.

        Names that are not in `told`, and indices without a name, become 0, the target's.
        """
        table = bytearray(256)
        for source_index, name in enumerate(self.source_names, start=1):
            table[source_index] = told.index(name) + 1 if name in told else 0
        return bytes(table)

    def cancel_soon(self) -> None:
        """End all sessions without waiting for the answers."""
        for key in self.keys:
            self.link.cancel_soon(key, self.epoch)


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """The choices to open, with the tokens of each that are generated already."""

    ids: Mapping[int, Sequence[int]]
    """Generated token ids by choice."""
    epoch: int = 0
    """The highest epoch that was seen of the session; 0: the session is new."""
    recovered: bool = False
    """Whether a verifier had admitted the sessions before."""
    moving: bool = False
    """Whether another verifier keeps the sessions until this one has them."""
    scoring: frozenset[int] = frozenset()
    """Choices whose prompt is to be scored."""


class Opener:
    """Opens one request on one verifier after another, and keeps its record in the store."""

    def __init__(
        self,
        ledger: Ledger,
        epochs: Epochs,
        state: RequestState,
        request: AdmittedRequest,
        target: TargetModel,
    ) -> None:
        self._ledger = ledger
        self._epochs = epochs
        self._state = state
        self._request = request
        self._target = target
        self.first = 0
        """The first epoch under which this request is on record: that of its wait, or the first that a
        verifier took it under, or may have; 0: none yet. A recorded Cancel of this epoch or a later one is
        meant for this request."""
        self.recorded = 0
        """The epoch under which this request is on record; 0: none yet."""

    def heard_of(self, epoch: int) -> None:
        """Go above this epoch, under which the session is on record.

        The record is a hint: an epoch that no clock could go above is ignored, and does not end the request.
        """
        if self._epochs.passes(epoch):
            self._state.epoch = max(self._state.epoch, epoch)

    def waits(self) -> int:
        """Record that a new request waits for its turn, so that a Cancel finds the request from anywhere.

        Returns the epoch of the record, which no verifier gets; Cancels of it are meant for this request.
        """
        request, known = self._request, self._state.epoch
        self.first = epoch = self._above(known) if known else self._epochs.next()
        self._state.opens(epoch)
        record = SessionRecord(request.key, epoch, "", request.choices, request=request.mark)
        self._record(record, epoch, {})
        return epoch

    async def open(
        self,
        link: VerifierLink,
        sources: Sequence[ChosenSource],
        plan: OpenPlan,
        time_left: float | None,
    ) -> Placement:
        """Open the choices of the plan under a new epoch above all known ones; all of them or none.

        An epoch that one verifier reports counts at the next verifier too, which may never have heard of the
        session. Raises OutriderError, also the one that ended the request meanwhile, OlderVerifier for a
        verifier that would ignore a part of the request, and DeadlineExceeded where no time is left: an Open
        sent as late as that may still reach the verifier, and would take the session from its earlier
        request.
        """
        if time_left == 0:
            raise DeadlineExceeded(
                "the request's time limit is over, and no verifier has taken the request; allow more time"
            )
        messages = await self._messages(plan, _sources_of(link, sources), time_left)
        _check_fields(messages[0], link)
        timeout_s = OPEN_S if time_left is None else min(OPEN_S, time_left)
        known = max(plan.epoch, self._state.epoch)
        epoch = self._above(known) if known else self._epochs.next()
        keys = tuple(key_from_wire(message.key) for message in messages)
        for _ in range(OPEN_ATTEMPTS):
            self._state.opens(epoch)
            self.first = self.first or epoch
            for message in messages:
                message.epoch = epoch
            try:
                with link.opening(len(messages)), self._recorded(link, keys, epoch, plan) as refused:
                    answers = await asyncio.gather(
                        *(link.open(message, timeout_s) for message in messages), return_exceptions=True
                    )
                    refused |= {
                        key for key, it in zip(keys, answers, strict=True) if isinstance(it, StaleEpoch)
                    }
                    opened = [it for it in answers if not isinstance(it, BaseException)]
                    if len(opened) < len(messages):
                        _raise_first([it for it in answers if isinstance(it, BaseException)])
                return Placement(link, epoch, keys, tuple(opened[0].source_names))
            except StaleEpoch as error:
                self.first = 0 if self.first == epoch else self.first
                epoch = self._above(error.highest)
        session = self._request.key.session
        raise Superseded(f"others keep taking session {session!r}; end them, or use another name")

    async def change_sources(
        self, placement: Placement, sources: Sequence[ChosenSource], ids: Mapping[int, Sequence[int]]
    ) -> None:
        """Give the choices in `ids` these sources; the choices stay where they are. Raises OutriderError."""
        there = _sources_of(placement.link, sources)
        messages = await self._messages(OpenPlan(ids, recovered=True), there, None)
        for message in messages:
            message.epoch = placement.epoch
        await asyncio.gather(*(placement.link.open(message, CHANGE_S) for message in messages))

    @contextmanager
    def _recorded(
        self, link: VerifierLink, keys: Sequence[SessionKey], epoch: int, plan: OpenPlan
    ) -> Iterator[set[SessionKey]]:
        """Record where the sessions are opened, and undo it where that fails.

        The caller puts the keys that the verifier refused into the set; all others are cancelled on failure,
        since an Open that failed may have been carried out all the same. A request that was decoded before
        stays on record, at no verifier: it may be opened again, and a Cancel has to find it until then.
        Sessions that move are recorded under the new epoch only once they are open, because the old verifier
        has them until then.
        """
        request, refused = self._request, set[SessionKey]()
        record = SessionRecord(request.key, epoch, link.address, request.choices, request=request.mark)
        lifts = self.first if request.have is None else 0
        if not plan.moving:
            self._record(record, lifts, plan.ids)
        try:
            yield refused
        except BaseException:
            for key in keys:
                if key not in refused:
                    link.cancel_soon(key, epoch)
            if plan.recovered and not plan.moving:
                self._record(record._replace(verifier=""), lifts, plan.ids)
            elif not plan.moving:
                self._ledger.ended(request, self._target.name, epoch, whole=False)
            raise
        if plan.moving:
            self._record(record, lifts, plan.ids)

    def _record(self, record: SessionRecord, lifts: int, ids: Mapping[int, Sequence[int]]) -> None:
        self.recorded = record.epoch
        self._ledger.opened(record, lifts, dict(ids))

    def _above(self, highest: int) -> int:
        try:
            return self._epochs.above(highest)
        except InvalidRequest as error:
            session = self._request.key.session
            raise Superseded(f"session {session!r} cannot be taken over: {error}") from error

    async def _messages(
        self, plan: OpenPlan, sources: Sequence[ChosenSource], time_left: float | None
    ) -> list[verifier_pb2.OpenRequest]:
        """One Open for each choice of the plan, without an epoch; other requests go on between two."""
        request, speculation = self._request, self._request.speculation
        left_ms = 0 if time_left is None else min(MAX_MS, int(time_left * 1000) + DEADLINE_MARGIN_MS)
        messages: list[verifier_pb2.OpenRequest] = []
        for choice, generated in plan.ids.items():
            if messages:
                await asyncio.sleep(0)
            message = verifier_pb2.OpenRequest(
                key=key_to_wire(request.keys[choice]),
                model=self._target.name,
                ids=[*request.ids, *generated],
                prompt_length=len(request.ids),
                limit=request.limit,
                sampling=sampling_to_wire(request.params),
                seed=request.seed_of(choice),
                stop=request.stops,
                time_left_ms=left_ms,
                speculate=speculation.enabled,
                node_limit=speculation.node_limit,
                sources=[verifier_pb2.Source(name=source.name, address=source.address) for source in sources],
                logprobs=None if request.logprobs is None else logprobs_to_wire(request.logprobs),
                recovered=plan.recovered,
                grammar=None if request.grammar is None else grammar_to_wire(request.grammar),
                learn=speculation.learn,
                corpora=speculation.corpora,
                prediction=speculation.prediction if speculation.enabled else (),
                references=[
                    verifier_pb2.ReferenceIds(ids=ids)
                    for ids in speculation.references
                    if speculation.enabled
                ],
                policy=speculation.policy,
                score_prompt=choice in plan.scoring,
                criterion=None if speculation.criterion is None else criterion_to_wire(speculation.criterion),
            )
            messages.append(message)
        return messages


def _check_fields(message: verifier_pb2.OpenRequest, link: VerifierLink) -> None:
    """Raises OlderVerifier where the verifier would ignore what the request asks for."""
    if link.target is not None and (field := unknown_field(message, link.target.request_fields)):
        raise OlderVerifier(
            f"the request uses {field}, which a verifier of model {message.model!r} is too old to "
            "know; leave the field out, or ask once the verifiers are upgraded"
        )


def _sources_of(link: VerifierLink, sources: Sequence[ChosenSource]) -> tuple[ChosenSource, ...]:
    """The sources as the link's verifier has them."""
    return sources_at(sources, () if link.target is None else link.target.local_sources)


def _raise_first(errors: Sequence[BaseException]) -> NoReturn:
    """Raise the StaleEpoch with the highest epoch, else the first error.

    The next attempt is then above all epochs.
    """
    stale = [error for error in errors if isinstance(error, StaleEpoch)]
    raise max(stale, key=lambda error: error.highest) if stale else errors[0]
