"""The bound on requests that this orchestrator answers at once, whichever front they come through."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.relay.relay import Relay
from speculative.errors import InvalidRequest, Overloaded, Unavailable

RETRY_AFTER_S = 1.0
CANCELS_S = 0.2
"""How long cancels may take to leave this process once streams have been cut, in seconds."""


class ConcurrencyLimit:
    """Admits requests until there are `most`, and ends those of `relay` when the process stops."""

    def __init__(self, relay: Relay, most: int) -> None:
        self._relay = relay
        self._most = most
        self._inside = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    @contextmanager
    def enter(self, count: int = 1, *, held: int = 0) -> Iterator[None]:
        """Count this many requests for as long as the context lasts.

        `held` is the number of requests that the same call counts already. Raises Overloaded, Unavailable
        where the process stops, and InvalidRequest where `held + count` is above the bound itself.
        """
        self._check(count, held)
        self._inside += count
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= count
            if not self._inside:
                self._idle.set()

    async def stop(self, grace: float) -> None:
        """Admit no more requests; those that run may go on for `grace` seconds."""
        self._stopping = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            self._relay.end_all(Unavailable("this orchestrator is stopping; try another, or try again"))
            await asyncio.sleep(CANCELS_S)

    def _check(self, count: int, held: int) -> None:
        if self._stopping:
            raise Unavailable("this orchestrator is stopping; try another, or try again")
        if held + count > self._most:
            raise InvalidRequest(
                f"prompt has {held + count} prompts; at most {self._most} are answered at once"
            )
        if self._inside + count > self._most:
            raise Overloaded(f"{self._inside} requests run here, {self._most} there may be", RETRY_AFTER_S)
