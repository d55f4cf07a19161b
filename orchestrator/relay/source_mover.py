"""Gives running requests other sources where theirs are gone, out of reach, about to end, or lagging.

A session decodes without drafts meanwhile, so nothing waits for this, and only speed depends on it.
"""

import asyncio
import logging

from orchestrator.fleet.placement import ChosenSource
from orchestrator.relay.relayed_request import RelayedRequest
from outrider.wire.status import peer_text
from speculative.errors import OutriderError

log = logging.getLogger(__name__)

EVERY_S = 0.25


class SourceMover:
    """Checks the sources of all its requests every EVERY_S seconds, from `start` to `stop`."""

    def __init__(self) -> None:
        self._requests: dict[RelayedRequest, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, request: RelayedRequest) -> None:
        """Check the sources of this request from now on."""
        self._requests[request] = None

    def drop(self, request: RelayedRequest) -> None:
        """Stop checking the sources of this request."""
        self._requests.pop(request, None)

    def start(self) -> None:
        """Begin to check running requests for lost sources."""
        self._task = asyncio.create_task(self._run(), name="sources")

    async def stop(self) -> None:
        """Stop checking; requests keep the sources that they have."""
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
        """Replace the lost sources of all requests, once, and each lagging source of one request."""
        moves = []
        left: set[str] = set()
        for request in self._requests:
            before = request.sources
            if (instead := request.sources_instead(left)) != before:
                left |= {source.address for source in before} - {source.address for source in instead}
                request.use(instead)  # counted before the next request chooses
                moves.append(_send(request, before))
        await asyncio.gather(*moves)


async def _send(request: RelayedRequest, before: tuple[ChosenSource, ...]) -> None:
    """Name the new sources to the request's verifier; go back to those before where that fails."""
    sources = request.sources
    fields = {"sources": ", ".join(f"{it.name} {it.address}".strip() for it in sources)}
    try:
        await request.send_sources()
        log.info("sources changed", extra={"fields": fields})
    except OutriderError as error:
        log.debug("sources not changed", extra={"fields": {**fields, "why": peer_text(str(error))}})
        if request.sources == sources:  # and not chosen anew since
            request.use(before)
