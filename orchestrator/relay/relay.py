"""All requests that are being answered here; a later one for the same session ends the earlier."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.verifier_link import VerifierLink
from orchestrator.front.admission import Admitted, Target
from orchestrator.front.having import fill_have
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.events import Event
from orchestrator.relay.opener import Opener
from orchestrator.relay.recovery import Clock
from orchestrator.relay.request import Answer
from orchestrator.relay.request_state import Running
from orchestrator.relay.source_mover import SourceMover
from orchestrator.store.ledger import Ledger
from outrider.v1 import generation_pb2
from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError, StaleEpoch, Superseded


class Relay:
    """Answers admitted requests, one `answer` each.

    Args:
        patience_s: how long a request without a deadline that lost its verifier waits for another.
    """

    def __init__(self, fleet: Fleet, ledger: Ledger, epochs: Epochs, patience_s: float) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._epochs = epochs
        self._patience_s = patience_s
        self._running: dict[SessionKey, Running] = {}
        self._mover = SourceMover(fleet)

    def start(self) -> None:
        """Begin to keep an eye on sources."""
        self._mover.start()

    async def stop(self) -> None:
        """Sources are changed no more."""
        await self._mover.stop()

    async def answer(
        self, request: Admitted, target: Target, time_left: float | None
    ) -> AsyncGenerator[Event, None]:
        """See Answer.events. Raises OutriderError."""
        clock = Clock(time.monotonic, time_left, self._patience_s)
        sources = self._fleet.sources_for(target, request.speculation)
        running = self._take_over(request.key)
        self._fleet.count_sessions(sources, request.choices)
        opener = Opener(self._ledger, self._epochs, running)
        answer = Answer(self._fleet, opener, self._ledger, clock, request, target, sources, running)
        self._mover.add(answer)
        try:
            known = await self._ledger.whereabouts(request, target.name)
            running.cancelled = running.cancelled or known.cancelled
            async with aclosing(answer.events(known)) as events:
                async for event in events:
                    yield event
        finally:
            self._mover.drop(answer)
            answer.use(())
            if self._running.get(request.key) is running:
                del self._running[request.key]
            if answer.ended or not request.resumable:
                self._ledger.ended(request, target.name, answer.epoch, whole=answer.ended)
            else:
                self._ledger.left(request.key, answer.epoch)

    async def fill_have(
        self, start: generation_pb2.GenerateStart, key: SessionKey, prompt: Sequence[int]
    ) -> None:
        """See having.fill_have."""
        await fill_have(start, key, prompt, self._ledger.recorded)

    async def cancel(self, key: SessionKey) -> bool:
        """End the session's current request; whether one was running."""
        running = self._running.get(key)
        if running is not None:
            running.cancelled = True
        record = await self._ledger.cancel(key)
        link = self._fleet.verifiers.get(record.verifier) if record is not None else None
        if record is None or link is None:
            return running is not None
        keys = [key._replace(choice=choice) for choice in range(record.choices)]
        found = await asyncio.gather(*(_cancelled(link, choice, record.epoch) for choice in keys))
        return (any(found) and not record.cancelled) or running is not None

    def end_all(self, error: OutriderError) -> None:
        """Every client gets this error in place of what is still to come."""
        for running in self._running.values():
            running.end(error)

    def _take_over(self, key: SessionKey) -> Running:
        if (earlier := self._running.get(key)) is not None:
            earlier.end(Superseded(f"a later request took over session {key.session!r}"))
        running = self._running[key] = Running(earlier)
        return running


async def _cancelled(link: VerifierLink, key: SessionKey, epoch: int) -> bool:
    """Whether a session was running, and is ended now."""
    try:
        return await link.cancel(key, epoch)
    except StaleEpoch:  # a later request has it, and that one is not what was to be cancelled
        return False
