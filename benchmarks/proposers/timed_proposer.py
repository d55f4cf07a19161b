"""A batched proposer whose levels are timed, in processor time of the engine's thread."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from verifier_service.proposers.batched import (
    BatchedProposer,
    DraftAsk,
    DraftLevel,
    ProposedSession,
    SeenPass,
)


class LevelTimes(NamedTuple):
    """What one level of drafts took."""

    calls: int = 0
    """Calls that computed the level."""
    seconds: float = 0.0
    nodes: int = 0

    def plus(self, seconds: float, nodes: int) -> "LevelTimes":
        """These times, and one more call."""
        return LevelTimes(self.calls + 1, self.seconds + seconds, self.nodes + nodes)

    def less(self, other: "LevelTimes") -> "LevelTimes":
        """What was added to other times."""
        return LevelTimes(self.calls - other.calls, self.seconds - other.seconds, self.nodes - other.nodes)


class TimedProposer:
    """A BatchedProposer that passes every call on.

    Args:
        inner: the proposer to time.
    """

    def __init__(self, inner: BatchedProposer) -> None:
        self.needs = inner.needs
        self.levels: list[LevelTimes] = []
        """By depth."""
        self._inner = inner

    def open(self, session: ProposedSession) -> None:
        """Passes the call on."""
        self._inner.open(session)

    def close(self, handle: int) -> None:
        """Passes the call on."""
        self._inner.close(handle)

    def saw(self, seen: SeenPass) -> None:
        """Passes the call on."""
        self._inner.saw(seen)

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """The levels of the proposer, each timed."""
        drafts, depth = self._inner.draft(asks), 0
        while True:
            began_s = time.thread_time()
            level = next(drafts, None)
            took_s = time.thread_time() - began_s
            if level is None:
                return
            if depth == len(self.levels):
                self.levels.append(LevelTimes())
            nodes = sum(len(one.tokens) for one in level if one is not None)
            self.levels[depth] = self.levels[depth].plus(took_s, nodes)
            yield level
            depth += 1
