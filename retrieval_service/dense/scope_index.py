"""The documents of one scope (a tenant, or everybody) and the index over their chunks.

Searching beside adding and deleting is safe: an index is swapped whole or appended to under a lock held for
moments, and long work (embedding, building anew) happens outside of it. Knows nothing of files and tenants.
"""

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval_service.dense.embeddings import Vectors
from retrieval_service.dense.index import Sizes, VectorIndex
from retrieval_service.dense.matching import Ids

Halves = NDArray[np.float16]
T = TypeVar("T")

_CHUNKS_PER_DOCUMENT = 16
"""Chunks fetched for each document asked for: the nearest ones are often of one document."""
_DEAD_SHARE = 0.25
"""A larger share of deleted rows than this has the index built anew."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text as ids (int32, never written to); names are unique within a scope."""

    name: str
    ids: Ids


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document near a vector, their cosine, and the start of the document's nearest chunk."""

    document: Document
    score: float
    start: int


@dataclass(frozen=True, slots=True)
class IndexedDocument:
    """A document with its chunks' vectors, float16 [chunks, dimensions], and their first row in the index."""

    document: Document
    vectors: Halves
    first: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A scope's documents at one moment: in order of their rows, with the index over exactly those rows.

    `changes` counts the changes up to that moment.
    """

    entries: tuple[IndexedDocument, ...]
    index: VectorIndex
    changes: int = 0


class ScopeIndex:
    """The documents of one scope, with an index over their chunks."""

    def __init__(self, dimensions: int, stride: int, sizes: Sizes) -> None:
        self._dimensions = dimensions
        self._stride = stride
        self._sizes = sizes
        self._writing = threading.RLock()
        self._lock = threading.Lock()
        self._entries: dict[str, IndexedDocument] = {}
        self._rows: list[IndexedDocument] = []
        self._starts: list[int] = []
        self._total = 0
        self._dead: list[IndexedDocument] = []
        self._index = self._build([])
        self.changes = 0
        """Additions and removals so far."""

    @classmethod
    def restored(cls, snapshot: Snapshot, stride: int, sizes: Sizes) -> "ScopeIndex":
        """A scope's index from a snapshot."""
        scope_index = cls(snapshot.index.dimensions, stride, sizes)
        scope_index._swap(snapshot.entries, snapshot.index)
        return scope_index

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def kind(self) -> str:
        """The present kind of the index."""
        return self._index.kind

    def documents(self) -> list[Document]:
        """All documents, in order of adding."""
        with self._lock:
            return [entry.document for entry in self._entries.values()]

    def holds(self, document: Document) -> bool:
        """Whether this very document is still here, neither deleted nor replaced; never waits."""
        entry = self._entries.get(document.name)
        return entry is not None and entry.document is document

    def add(self, documents: Iterable[tuple[Document, Vectors]]) -> None:
        """Adds documents with their chunks' vectors; a document of a known name replaces the other."""
        with self._writing:
            added = [(document, vectors.astype(np.float16)) for document, vectors in documents]
            after = self._total + sum(len(vectors) for _, vectors in added)
            grown = self._sizes.kind(after) != self._index.kind
            for document, vectors in added:
                with self._lock:
                    self._drop(document.name)
                    self._append(document, vectors, index=not grown)
            if self._is_cluttered():
                self._rebuild()

    def remove(self, *names: str) -> int:
        """Removes documents from every later search; returns how many there were. Waits for no other rebuild.

        Builds the index anew at most once.
        """
        with self._lock:
            removed = sum(map(self._drop, names))
        if removed and self._is_cluttered() and self._writing.acquire(blocking=False):
            try:
                self._rebuild()
            finally:
                self._writing.release()
        return removed

    def search(self, vector: Vectors, count: int) -> list[FoundDocument]:
        """The documents nearest to a unit vector, float32 [dimensions], at most `count`, best first."""
        with self._lock:
            near = self._index.search(vector, count * _CHUNKS_PER_DOCUMENT, self._left_out())
            chunks = [(self._entry_of(row), row, score) for row, score in near]
        best: dict[str, FoundDocument] = {}
        for entry, row, score in chunks:
            at = row - entry.first
            # Compressed vectors rank roughly: what they found is ranked again by the vectors themselves.
            exact = float(entry.vectors[at].astype(np.float32) @ vector) if self.kind == "ivfpq" else score
            name = entry.document.name
            if name not in best or exact > best[name].score:
                best[name] = FoundDocument(entry.document, exact, at * self._stride)
        return sorted(best.values(), key=lambda found: (-found.score, found.document.name))[:count]

    def with_snapshot(self, use: Callable[[Snapshot], T]) -> T:
        """Calls `use` with a snapshot without deleted rows; nothing is added meanwhile."""
        with self._writing:
            while True:
                with self._lock:
                    if not self._dead and len(self._index) == self._total:
                        snapshot = Snapshot(tuple(self._rows), self._index, self.changes)
                        break
                self._rebuild()
            return use(snapshot)

    def _drop(self, name: str) -> bool:
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._dead.append(entry)
        self.changes += 1
        return True

    def _append(self, document: Document, vectors: Halves, *, index: bool) -> None:
        entry = IndexedDocument(document, vectors, self._total)
        self._entries[document.name] = entry
        self._rows.append(entry)
        self._starts.append(entry.first)
        # Rows that are not in the index yet are missing at its end, so that later ones have to wait too.
        if index and len(self._index) == self._total:
            self._index.add(vectors)
        self._total += len(vectors)
        self.changes += 1

    def _left_out(self) -> NDArray[np.bool_] | None:
        """Mask of the index' rows that belong to deleted documents."""
        if not self._dead:
            return None
        mask = np.zeros(len(self._index), dtype=np.bool_)
        for entry in self._dead:
            mask[entry.first : entry.first + len(entry.vectors)] = True
        return mask

    def _entry_of(self, row: int) -> IndexedDocument:
        return self._rows[bisect.bisect_right(self._starts, row) - 1]

    def _is_cluttered(self) -> bool:
        """Whether to rebuild the index: too many of its rows are deleted, or rows are missing."""
        dead = sum(len(entry.vectors) for entry in self._dead)
        return dead > _DEAD_SHARE * self._total or len(self._index) < self._total

    def _rebuild(self) -> None:
        """Builds the index anew over the present documents, and swaps it in. The caller holds `_writing`."""
        with self._lock:
            living = list(self._entries.values())
        entries, first = [], 0
        for entry in living:
            entries.append(IndexedDocument(entry.document, entry.vectors, first))
            first += len(entry.vectors)
        self._swap(entries, self._build(entries))

    def _build(self, entries: Sequence[IndexedDocument]) -> VectorIndex:
        blocks = [entry.vectors for entry in entries] or [np.zeros((0, self._dimensions), dtype=np.float16)]
        vectors = np.concatenate(blocks)
        return VectorIndex.build(vectors, self._sizes.kind(len(vectors)))

    def _swap(self, entries: Iterable[IndexedDocument], index: VectorIndex) -> None:
        """Swaps a built index in; documents removed during the build stay removed."""
        rows = list(entries)
        with self._lock:
            # A restored index held nothing before; in any other, only removals can have come between.
            known = self._entries if self._rows else {entry.document.name: entry for entry in rows}
            self._rows, self._index, self._total = rows, index, len(index)
            self._starts = [entry.first for entry in rows]
            living = [
                entry
                for entry in rows
                if (now := known.get(entry.document.name)) is not None and now.document is entry.document
            ]
            self._entries = {entry.document.name: entry for entry in living}
            self._dead = [entry for entry in rows if entry.document.name not in self._entries]
