"""What a Watch brought for one session, kept until its request takes it.

Bounded by the session's own limit: committed ids and one end. Knows nothing of the stream itself.
"""

import asyncio

from outrider.v1 import verifier_pb2
from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError


class Reader:
    """One session's place on a Watch stream; made and fed by the link, taken by the request."""

    def __init__(self, alias: int, key: SessionKey, epoch: int, position: int) -> None:
        self.alias = alias
        self.key = key
        self.epoch = epoch
        self.position = position
        """Ids that have arrived, prompt included: where a reopened stream goes on."""
        self._arrived: list[verifier_pb2.Committed] = []
        self._error: OutriderError | None = None
        self._wake = asyncio.Event()

    def feed(self, committed: verifier_pb2.Committed) -> None:
        """More has come."""
        self.position = max(self.position, committed.position + len(committed.ids))
        self._arrived.append(committed)
        self._wake.set()

    def fail(self, error: OutriderError) -> None:
        """Nothing more will come; the first reason stands."""
        self._error = self._error or error
        self._wake.set()

    async def take(self) -> list[verifier_pb2.Committed]:
        """All that has come since the last call, waiting for the first. Raises what `fail` was given."""
        await self._wake.wait()
        arrived, self._arrived = self._arrived, []
        if self._error is None:
            self._wake.clear()
        elif not arrived:
            raise self._error
        return arrived
