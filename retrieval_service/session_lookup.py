"""The memories of followed sessions: looks sessions up in them, and has sessions' output kept.

Belongs to the worker's thread.
"""

import time
from collections.abc import Callable
from typing import Protocol

from outrider.source.events import NotFollowed
from outrider.wire.codec import SessionKey
from retrieval_service.catalogue import CORPUS, DENSE, PAST, Catalogue, scope, session_name
from retrieval_service.joint_tree import FoundTrie
from retrieval_service.ranking import DraftShape
from retrieval_service.session import RetrievalSession
from retrieval_service.trie import Memory
from speculative.fragment import Fragment

CANDIDATES = 2
"""Nodes to look up per node of a draft: the noise may prefer a rarer continuation."""


class LookupCounts(Protocol):
    """Counts of lookups, matches and learnt tokens."""

    lookups: int
    matches: int
    tokens_learnt: int


class SessionLookup:
    """Looks all sessions up in their memories.

    Args:
        observe: called for every lookup with the memory's name and the seconds that it took.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        shape: DraftShape,
        counts: LookupCounts,
        observe: Callable[[str, float], None],
    ) -> None:
        self._catalogue = catalogue
        self._shape = shape
        self._counts = counts
        self._observe = observe
        self._near: dict[SessionKey, Memory] = {}

    def begin(self, session: RetrievalSession) -> None:
        """Opens a session's memories. Raises NotFollowed for a corpus that its tenant does not have."""
        request, key = session.request, session.key
        if CORPUS in request.sources:
            self._catalogue.corpora(key.tenant, request.corpora)
        near = self._catalogue.near
        if near is not None and DENSE in request.sources:
            self._near[key] = near.follow(key, scope(key.tenant), session.ids.array)
        self._learn(session)

    def progress(self, session: RetrievalSession) -> None:
        """Keeps a session's new output, and passes its ids on to the search for documents."""
        if session.key in self._near:
            assert self._catalogue.near is not None
            self._catalogue.near.progress(session.key, session.ids.array)
        self._learn(session)

    def finish(self, key: SessionKey) -> None:
        """Frees what is held for a session that is over."""
        if self._near.pop(key, None) is not None:
            assert self._catalogue.near is not None
            self._catalogue.near.end(key)
        if self._catalogue.past is not None:
            self._catalogue.past.finish(scope(key.tenant), session_name(key))

    def draft(self, session: RetrievalSession) -> list[Fragment]:
        """Drafts for a session: one tree of what all of its memories found."""
        recent = session.recent
        found: dict[int, FoundTrie] = {}
        for source, name in enumerate(session.request.sources, start=1):
            memory = self._memory(session, name)
            if memory is None:
                continue
            began = time.perf_counter()
            trie = memory.lookup(recent, node_limit=CANDIDATES * self._shape.nodes, depth=self._shape.depth)
            self._observe(name, time.perf_counter() - began)
            self._counts.lookups += 1
            if trie is not None:
                self._counts.matches += 1
                found[source] = FoundTrie(name, trie)
        return session.draft(found)

    def _memory(self, session: RetrievalSession, name: str) -> Memory | None:
        """The session's memory of this name; None for an unknown name."""
        key = session.key
        if name == CORPUS:
            return self._corpora(session)
        if name == PAST and self._catalogue.past is not None:
            return self._catalogue.past.memory(scope(key.tenant))
        if name == DENSE:
            return self._near.get(key)
        return None

    def _corpora(self, session: RetrievalSession) -> Memory | None:
        """The session's corpora; None if a corpus that it asked for by name has gone since."""
        try:
            return self._catalogue.corpora(session.key.tenant, session.request.corpora)
        except NotFollowed:
            return None

    def _learn(self, session: RetrievalSession) -> None:
        past = self._catalogue.past
        if past is not None and (fresh := session.take_unkept()):
            kept = past.extend(scope(session.key.tenant), session_name(session.key), fresh)
            self._counts.tokens_learnt += len(fresh) if kept else 0
