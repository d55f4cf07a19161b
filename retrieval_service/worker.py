"""The retrieval worker's thread: looks sessions up in the memories and answers with fragments.

All that has arrived is taken in before anything is looked up, so that a session is looked up once however
much it has committed meanwhile. Corpora change in the same thread, between two lookups.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.source.events import Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.source.worker import AnsweringWorker, Publish, WorkerCounts
from retrieval_service.catalogue import Catalogue
from retrieval_service.ranking import DraftShape
from retrieval_service.session import RetrievalSession
from retrieval_service.session_lookup import SessionLookup
from retrieval_service.trust import TrustBook
from speculative.fragment import Fragment

COUNTERS = {
    "lookups": "Lookups of one session in one memory.",
    "matches": "Lookups that found a continuation.",
    "tokens_learnt": "Tokens of output that were kept to draft from.",
}
"""Help texts of the fields of `RetrievalCounts`."""
GAUGES = {
    "corpora": "Loaded corpora.",
    "corpus_tokens": "Tokens of the loaded corpora.",
    "mapped_bytes": "Mapped bytes of the loaded corpora.",
    "past_tokens": "Tokens of past output held.",
    "documents": "Documents of tenants held.",
}
"""Help texts of `RetrievalWorker.gauges`."""


@dataclass(slots=True)
class RetrievalCounts(WorkerCounts):
    """What the retrieval worker has counted since it started."""

    lookups: int = 0
    matches: int = 0
    tokens_learnt: int = 0


class RetrievalWorker(AnsweringWorker[RetrievalSession]):
    """Follows sessions and drafts for them from its memories.

    Args:
        observe: called for every lookup with the memory's name and the seconds that it took.
    """

    failure = "the retrieval service failed on this session; its log says why"
    counts: RetrievalCounts

    def __init__(
        self,
        catalogue: Catalogue,
        profile: SourceProfile,
        publish: Publish,
        observe: Callable[[str, float], None],
        *,
        shape: DraftShape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(profile, publish, counts=RetrievalCounts(), clock=clock)
        self.catalogue = catalogue
        self._shape = shape
        self._lookup = SessionLookup(catalogue, shape, self.counts, observe)
        self._trust = TrustBook()

    def open(self, follow: Follow, ids: FollowedIds, kept: RetrievalSession | None) -> RetrievalSession:
        """Follows a session; one that comes back goes on where its output was kept last."""
        trust = self._trust.session(follow.key.tenant, follow.request.learn)
        session = RetrievalSession(follow, ids, self._shape, trust, kept)
        if session.is_new_text:
            self._lookup.finish(follow.key)
        try:
            self._lookup.begin(session)
        except BaseException:
            self._lookup.finish(follow.key)
            raise
        return session

    def progressed(self, session: RetrievalSession, fresh: Sequence[int]) -> None:
        """Learns from new output which memories were right, keeps it, and looks the session up again."""
        if fresh:
            session.commit(fresh)
            self._lookup.progress(session)
        super().progressed(session, fresh)

    def draft(self, session: RetrievalSession) -> list[Fragment]:
        """Drafts one tree from one lookup in each of the session's memories."""
        return self._lookup.draft(session)

    def close(self, session: RetrievalSession) -> None:
        """Frees what the memories hold for a session that is over."""
        self._lookup.finish(session.key)

    def unlearn(self, tenant: str, session: str | None) -> None:
        """Stops keeping output of a running session, all its choices, or of all of a tenant's sessions."""
        for one in [*self.roster, *self.roster.kept]:
            if one.key.tenant == tenant and session in (None, one.key.session):
                one.learns = False

    def shut_down(self) -> None:
        """Closes every session, then every corpus."""
        super().shut_down()
        self.catalogue.close()

    def gauges(self) -> dict[str, float]:
        """Counts of what the memories hold now, of all tenants together, by metric."""
        headers = [index.header for _, index in self.catalogue]
        past, near = self.catalogue.past, self.catalogue.near
        return super().gauges() | {
            "corpora": len(headers),
            "corpus_tokens": sum(header.tokens for header in headers),
            "mapped_bytes": sum(header.size for header in headers),
            "past_tokens": 0 if past is None else past.stats().tokens,
            "documents": 0 if near is None else near.count,
        }
