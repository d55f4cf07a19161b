"""Gives running requests other sources where theirs are gone, out of reach, or about to end.

A session decodes without drafts meanwhile, so nothing waits for this and nothing depends on it but speed.
"""

import asyncio
import logging

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.placement import ChosenSource
from orchestrator.relay.request import Answer
from outrider.wire.status import peer_text
from speculative.errors import OutriderError

log = logging.getLogger(__name__)

EVERY_S = 0.25


class SourceMover:
    """`start` and `stop` it; it looks after the answers that it is given."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._answers: dict[Answer, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, answer: Answer) -> None:
        """Its request begins."""
        self._answers[answer] = None

    def drop(self, answer: Answer) -> None:
        """It has ended."""
        self._answers.pop(answer, None)

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="sources")

    async def stop(self) -> None:
        """Answers keep what they have."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.move()
            except Exception:  # a fault of this code costs drafts, never a request
                log.exception("sources were not changed")

    async def move(self) -> None:
        """Once, for all of them."""
        moves = []
        for answer in self._answers:
            before = answer.sources
            if (instead := self._fleet.sources_instead(answer.target, before)) != before:
                answer.use(instead)  # counted before the next one chooses
                moves.append(_tell(answer, before))
        await asyncio.gather(*moves)


async def _tell(answer: Answer, before: tuple[ChosenSource, ...]) -> None:
    told = answer.sources
    fields = {"sources": ", ".join(f"{it.name} {it.address}".strip() for it in told)}
    try:
        await answer.tell_sources()
        log.info("sources changed", extra={"fields": fields})
    except OutriderError as error:
        log.debug("sources not changed", extra={"fields": {**fields, "why": peer_text(str(error))}})
        if answer.sources == told:  # and not chosen anew since
            answer.use(before)
