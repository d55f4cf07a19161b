"""The worker of a drafter that learns: collects passages, and swaps weights between two passes."""

from collections.abc import Callable, Sequence
from typing import Any

from drafter_service.draft_tree import Rerooted
from drafter_service.learning.collector import Collector
from drafter_service.session import DraftingSession
from drafter_service.worker import DrafterWorker
from speculative.observed import Observed, TopIds


class LearningWorker(DrafterWorker):
    """Drafts as `DrafterWorker` does, and keeps what the target said for later lessons.

    Args:
        collector: takes what the target said.
        ended: called at the end of `run`, before anything is closed.
        others: the rest of `DrafterWorker`'s arguments.
    """

    def __init__(
        self, *args: Any, collector: Collector, ended: Callable[[], None], version: int, **others: Any
    ) -> None:
        super().__init__(*args, **others)
        self._collector = collector
        self._ended = ended
        self._said: dict[DraftingSession, tuple[TopIds, ...]] = {}
        self.version = version

    def observed(self, session: DraftingSession, said: Observed) -> None:
        """Takes the target's likeliest ids at the places of the ids that `progressed` brings next."""
        self._said[session] = said.tops

    def rerooted(self, session: DraftingSession, fresh: Sequence[int], moved: Rerooted) -> None:
        """Keeps the places of the new ids, where the session's text may be kept."""
        tops = self._said.pop(session, ())
        self._collector.committed(session, tops, len(fresh), len(moved.path))

    def leave(self, session: DraftingSession) -> None:
        """Keeps what was collected of the session so far."""
        super().leave(session)
        self._forget(session)

    def close(self, session: DraftingSession) -> None:
        """Keeps what was collected of the session, and frees its cache."""
        super().close(session)
        self._forget(session)

    def shut_down(self) -> None:
        """Ends the learner, then closes every session."""
        self._ended()
        super().shut_down()

    def gauges(self) -> dict[str, float]:
        """Present values of the drafter's gauges, by metric."""
        return super().gauges() | {
            "weights_version": self.version,
            "learning_bytes": self._collector.buffer.nbytes,
        }

    def _forget(self, session: DraftingSession) -> None:
        self._said.pop(session, None)
        self._collector.ended(session)
