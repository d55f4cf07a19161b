"""The near documents of each session: those on its topic, which its drafts are copied from.

Looking for them happens in a thread of its own; a lookup uses those found so far, if any.
"""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from retrieval_service.dense.embeddings import Vectors
from retrieval_service.dense.library import DocumentLibrary
from retrieval_service.dense.matching import DocumentText, Ids
from retrieval_service.dense.scope_index import Document, FoundDocument
from retrieval_service.trie import CountedTrie

log = logging.getLogger(__name__)

_TEXTS_KEPT = 64
_SHORTEST_EXCERPT = 32


@dataclass(frozen=True, slots=True)
class NearLimits:
    """Bounds of one session's near documents.

    Attributes:
        documents: most documents.
        tokens: most tokens of all documents; a longer document is cut around the chunk that was found.
        nearest: least cosine at which a document is near enough.
        shortest: shortest match that is drafted from, in tokens.
    """

    documents: int = 4
    tokens: int = 16_384
    nearest: float = 0.0
    shortest: int = 1


@dataclass(frozen=True, slots=True)
class TopicRule:
    """When to search: at a session's start, and again when its last ids are about something else.

    Attributes:
        window: number of the session's last ids that stand for its topic.
        every: fewest new ids between two looks at the topic.
        threshold: the topic has changed if the cosine between this window and the last one searched with is
            below this.
    """

    window: int = 64
    every: int = 64
    threshold: float = 0.8

    def __post_init__(self) -> None:
        if self.window < 1 or self.every < 1 or not math.isfinite(self.threshold):
            raise ValueError(f"window and every are at least 1, threshold is finite, not {self}")

    def is_due(self, length: int, looked_at: int | None) -> bool:
        """Whether to look again at a session that has `length` ids and had `looked_at` at the last look."""
        return length > 0 and (looked_at is None or length - looked_at >= self.every or length < looked_at)

    def has_moved(self, now: Vectors, searched_with: Vectors | None) -> bool:
        """Whether two unit vectors stand for different topics; always true before the first search."""
        return searched_with is None or float(np.dot(now, searched_with)) < self.threshold


RULE = TopicRule()
LIMITS = NearLimits()


@dataclass(frozen=True, slots=True)
class _HeldText:
    documents: tuple[Document, ...]
    text: DocumentText


class SessionDocuments:
    """The near documents of one session, as a Memory that drafts are copied from."""

    def __init__(self, tenant: str, library: DocumentLibrary, limits: NearLimits) -> None:
        self.tenant = tenant
        self._library = library
        self._limits = limits
        self._held: _HeldText | None = None
        self.looked_at: int | None = None
        """The session's length when its topic was last looked at; None asks for it at the next progress."""
        self.searched_with: Vectors | None = None

    @property
    def documents(self) -> tuple[str, ...]:
        """Names of the session's present documents, nearest first."""
        held = self._held
        return () if held is None else tuple(document.name for document in held.documents)

    def hold(self, held: _HeldText | None) -> None:
        """Sets the documents that lookups copy from; None: there are none."""
        self._held = held

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """Looks a context up; see Memory. From its deletion on, finds nothing in a document."""
        held = self._held
        if held is None:
            return None
        if not all(self._library.holds(self.tenant, document) for document in held.documents):
            self._held = self.searched_with = self.looked_at = None
            return None
        return held.text.lookup(ids, node_limit=node_limit, depth=depth, shortest=self._limits.shortest)


@dataclass(slots=True)
class SearchCounts:
    """Counts of search wishes: `replaced` by a newer wish of the session, `dropped` for want of room."""

    done: int = 0
    failed: int = 0
    replaced: int = 0
    dropped: int = 0


class Searcher:
    """One thread that runs the newest wish of each session, in order of asking; nothing ever waits for it.

    At most `capacity` sessions wait; the wish that has waited longest is dropped to make room for another.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._waiting: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._failing = ""
        self.counts = SearchCounts()
        self._thread = threading.Thread(target=self._run, name="dense-search", daemon=True)
        self._thread.start()

    def ask(self, session: Hashable, wish: Callable[[], None]) -> None:
        """Queues a wish; it replaces an earlier one of the same session that still waits."""
        with self._changed:
            if self._closed:
                return
            if session in self._waiting:
                self.counts.replaced += 1
            elif len(self._waiting) >= self._capacity:
                self._waiting.popitem(last=False)
                self.counts.dropped += 1
            self._waiting[session] = wish
            self._changed.notify_all()

    def forget(self, session: Hashable) -> None:
        """Drops the wish of a session that still waits."""
        with self._changed:
            self._waiting.pop(session, None)

    def is_idle(self, timeout_s: float) -> bool:
        """Waits until no wish waits or runs; False if that takes longer than `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the wish in hand; drops those that wait."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                if self._closed:
                    return
                _, wish = self._waiting.popitem(last=False)
                self._busy = True
            failed = False
            try:
                wish()
            except Exception as error:  # one session's failure is not the others'
                failed = True
                self._say_failed(str(error) or type(error).__name__)
            else:
                self._failing = ""
            with self._changed:
                self.counts.failed += failed
                self.counts.done += not failed
                self._busy = False
                self._changed.notify_all()

    def _say_failed(self, why: str) -> None:
        """Logs a failure once until a search succeeds or fails otherwise: a server may be away for hours."""
        if why != self._failing:
            log.warning("searches for documents fail: %s", why)
        self._failing = why


class NearDocuments:
    """The near documents of all sessions. Safe from any thread; `close` it at the end."""

    def __init__(
        self,
        library: DocumentLibrary,
        *,
        rule: TopicRule = RULE,
        limits: NearLimits = LIMITS,
        capacity: int = 256,
    ) -> None:
        self._library = library
        self._rule = rule
        self._limits = limits
        self._sessions: dict[Hashable, SessionDocuments] = {}
        self._lock = threading.Lock()
        self._texts: OrderedDict[tuple[str, tuple[tuple[int, int, int], ...]], _HeldText] = OrderedDict()
        self._searcher = Searcher(capacity)

    @property
    def count(self) -> int:
        """Number of documents, of all tenants."""
        return len(self._library)

    @property
    def counts(self) -> SearchCounts:
        """Counts of searches so far."""
        return self._searcher.counts

    def follow(self, session: Hashable, tenant: str, ids: Sequence[int]) -> SessionDocuments:
        """Starts to find documents for a session; returns its memory, empty until some are found."""
        memory = SessionDocuments(tenant, self._library, self._limits)
        with self._lock:
            self._sessions[session] = memory
        self._searcher.forget(session)
        self.progress(session, ids)
        return memory

    def progress(self, session: Hashable, ids: Sequence[int]) -> None:
        """Takes in all ids that a session has now; queues a search if one is due. Takes microseconds."""
        memory = self._sessions.get(session)
        if memory is None or not self._rule.is_due(len(ids), memory.looked_at):
            return
        memory.looked_at = len(ids)
        window = tuple(ids[-self._rule.window :])
        self._searcher.ask(session, lambda: self._look(memory, window))

    def end(self, session: Hashable) -> None:
        """Frees what is held for a session that is over."""
        self._searcher.forget(session)
        with self._lock:
            self._sessions.pop(session, None)

    def is_idle(self, timeout_s: float) -> bool:
        """Waits until no search is queued or running; False if that takes longer than `timeout_s` seconds."""
        return self._searcher.is_idle(timeout_s)

    def close(self) -> None:
        """Ends the search thread."""
        self._searcher.close()

    def _look(self, memory: SessionDocuments, window: tuple[int, ...]) -> None:
        vector = self._library.embedder.embed([window])[0]
        if not self._rule.has_moved(vector, memory.searched_with):
            return
        found = self._library.search(memory.tenant, vector, self._limits.documents)
        near = [one for one in found if one.score >= self._limits.nearest]
        memory.hold(self._held(memory.tenant, near) if near else None)
        memory.searched_with = vector if near else None

    def _held(self, tenant: str, found: Sequence[FoundDocument]) -> _HeldText:
        """The text of these documents, one object for all sessions of a tenant. Searcher's thread only."""
        for stale in [key for key, held in self._texts.items() if not self._still_there(key[0], held)]:
            del self._texts[stale]
        spans = _excerpts(found, self._limits.tokens)
        parts = tuple((id(one.document), *span) for one, span in zip(found, spans, strict=False))
        key = (tenant, parts)
        held = self._texts.get(key)
        if held is None:
            texts: list[Ids] = [
                one.document.ids[low:high] for one, (low, high) in zip(found, spans, strict=False)
            ]
            text = DocumentText(texts)
            # Holding the documents keeps their `id()` from being another's.
            held = _HeldText(tuple(one.document for one in found[: len(spans)]), text)
            self._texts[key] = held
        self._texts.move_to_end(key)
        while len(self._texts) > _TEXTS_KEPT:
            self._texts.popitem(last=False)
        return held

    def _still_there(self, tenant: str, held: _HeldText) -> bool:
        return all(self._library.holds(tenant, document) for document in held.documents)


def _excerpts(found: Sequence[FoundDocument], tokens: int) -> list[tuple[int, int]]:
    """The part of each document to copy from, nearest first, `tokens` tokens in all."""
    spans = []
    left = tokens
    for one in found:
        length = len(one.document.ids)
        if left < min(length, _SHORTEST_EXCERPT):
            break
        low = 0 if length <= left else max(0, min(one.start - left // 4, length - left))
        high = min(length, low + left)
        spans.append((low, high))
        left -= high - low
    return spans
