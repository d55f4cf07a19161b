"""What waits to be sent on one stream: everything since the last message becomes the next one.

A peer that does not read costs the oldest drafts, which are the likeliest to be stale, and never the engine's
time. Belongs to the event loop; knows nothing of protobuf.
"""

import asyncio
from collections import deque

from outrider.source.events import Outgoing
from speculative.fragment import Fragment

MOST_DRAFTS = 512
MOST_REFUSALS = 4096


class Outbox:
    """Bounded; `put` never waits."""

    def __init__(self, most_drafts: int = MOST_DRAFTS) -> None:
        self._drafts: deque[tuple[int, Fragment]] = deque(maxlen=most_drafts)
        self._refusals: deque[tuple[int, str]] = deque(maxlen=MOST_REFUSALS)
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, outgoing: Outgoing) -> int:
        """Adds what a pass brought; returns how many nodes had to go for it."""
        lost = len(self._drafts) + len(outgoing.drafts) - (self._drafts.maxlen or 0)
        dropped = 0
        if lost > 0:
            oldest = [*self._drafts, *outgoing.drafts][:lost]
            dropped = sum(len(fragment) for _, fragment in oldest)
        self._drafts.extend(outgoing.drafts)
        self._refusals.extend(outgoing.refusals)
        self._changed.set()
        return dropped

    def close(self) -> None:
        """Nothing more will be put."""
        self._closed = True
        self._changed.set()

    async def take(self) -> Outgoing | None:
        """All that waits, once something does; None after `close`."""
        while not self._closed:
            if self._drafts or self._refusals:
                taken = Outgoing(list(self._drafts), list(self._refusals))
                self._drafts.clear()
                self._refusals.clear()
                return taken
            self._changed.clear()
            await self._changed.wait()
        return None
