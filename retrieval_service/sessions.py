"""What a followed session draws on and adds to: looks it up in its memories, and has its output kept.

Belongs to the engine's thread.
"""

import time
from collections.abc import Callable
from typing import Protocol

from outrider.source.events import NotFollowed
from outrider.wire.codec import SessionKey
from retrieval_service.holdings import CORPUS, DENSE, PAST, Holdings, name_of, scope
from retrieval_service.memories import Memory
from retrieval_service.ranking import Shape
from retrieval_service.roster import Followed
from speculative.fragment import Fragment

CANDIDATES = 3
"""Continuations are asked for in so many times the nodes of a draft: the noise may prefer a rarer one."""


class Tally(Protocol):
    """What is counted here."""

    lookups: int
    matches: int
    tokens_learnt: int


class Drawing:
    """The memories of all sessions.

    Args:
        observe: told of every lookup: under which name, and seconds.
    """

    def __init__(
        self, holdings: Holdings, shape: Shape, counts: Tally, observe: Callable[[str, float], None]
    ) -> None:
        self._holdings = holdings
        self._shape = shape
        self._counts = counts
        self._observe = observe
        self._references: dict[SessionKey, Memory] = {}

    def begin(self, followed: Followed) -> None:
        """A session is followed from now on. Raises NotFollowed for a corpus that it does not see."""
        request, key = followed.follower.request, followed.key
        if CORPUS in request.sources:
            self._holdings.corpora(key.tenant, request.corpora)
        references = self._holdings.references
        if references is not None and DENSE in request.sources:
            self._references[key] = references.follow(key, key.tenant, followed.follower.ids)
        self._learn(followed)

    def progress(self, followed: Followed) -> None:
        """It has more ids."""
        if followed.key in self._references:
            assert self._holdings.references is not None
            self._holdings.references.progress(followed.key, followed.follower.ids)
        self._learn(followed)

    def finish(self, key: SessionKey) -> None:
        """A session is over."""
        if self._references.pop(key, None) is not None:
            assert self._holdings.references is not None
            self._holdings.references.end(key)
        if self._holdings.past is not None:
            self._holdings.past.finish(scope(key.tenant), name_of(key))

    def draft(self, followed: Followed) -> list[Fragment]:
        """What its memories hold of what may come next: at most one fragment of each."""
        follower = followed.follower
        recent = follower.recent
        fragments = []
        for source, name in enumerate(follower.request.sources, start=1):
            memory = self._memory(followed, name)
            if memory is None:
                continue
            began = time.perf_counter()
            trie = memory.lookup(recent, node_limit=CANDIDATES * self._shape.nodes, depth=self._shape.depth)
            self._observe(name, time.perf_counter() - began)
            self._counts.lookups += 1
            if trie is None:
                continue
            self._counts.matches += 1
            fragment = follower.draft(source, trie)
            if fragment is not None:
                fragments.append(fragment)
        return fragments

    def _memory(self, followed: Followed, name: str) -> Memory | None:
        """None for a name that means nothing here."""
        key = followed.key
        if name == CORPUS:
            return self._corpora(followed)
        if name == PAST and self._holdings.past is not None:
            return self._holdings.past.memory(scope(key.tenant))
        if name == DENSE:
            return self._references.get(key)
        return None

    def _corpora(self, followed: Followed) -> Memory | None:
        """None where one that was asked for by name has gone since: the other memories remain."""
        try:
            return self._holdings.corpora(followed.key.tenant, followed.follower.request.corpora)
        except NotFollowed:
            return None

    def _learn(self, followed: Followed) -> None:
        past = self._holdings.past
        if past is not None and (fresh := followed.take_unkept()):
            kept = past.extend(scope(followed.key.tenant), name_of(followed.key), fresh)
            self._counts.tokens_learnt += len(fresh) if kept else 0
