"""What a Watch brought for one session, kept until its request takes it.

Bounded by the session's own limit: committed ids and one end. Knows nothing of the stream itself.
"""

import asyncio

from outrider.v1 import verifier_pb2
from outrider.wire.codec import SessionKey
from speculative.errors import OutriderError


class Reader:
    """One session's place on a Watch stream; made and fed by the link, taken by the request."""

    def __init__(self, alias: int, key: SessionKey, epoch: int, position: int, wake: asyncio.Event) -> None:
        self.alias = alias
        self.key = key
        self.epoch = epoch
        self.position = position
        """Ids that have arrived, prompt included: where a reopened stream goes on."""
        self.error: OutriderError | None = None
        """Why nothing more will come; None while more may."""
        self.urged = False
        """Whether the session should go to another verifier."""
        self._arrived: list[verifier_pb2.Committed] = []
        self._wake = wake

    def feed(self, committed: verifier_pb2.Committed) -> None:
        """More has come."""
        self.position = max(self.position, committed.position + len(committed.ids))
        self._arrived.append(committed)
        self._wake.set()

    def fail(self, error: OutriderError) -> None:
        """Nothing more will come; the first reason stands."""
        self.error = self.error or error
        self._wake.set()

    def urge(self) -> None:
        """The session should go to another verifier while this one still has it."""
        self.urged = True
        self._wake.set()

    def take(self) -> list[verifier_pb2.Committed]:
        """All that has come since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived
