"""The documents of all tenants, and the search for those near to a session; an index for each scope.

A document belongs to a tenant or is public. A search sees the index of its own tenant and the public one;
there is no index in which two tenants' documents stand together. Safe from several threads.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_service.corpus.disk import Disk, make_folder
from retrieval_service.dense.embeddings import Embedder, Vectors
from retrieval_service.dense.errors import LibraryDamaged, LibraryMismatch
from retrieval_service.dense.index import Sizes
from retrieval_service.dense.manifest import Maker, StoredScope, check_maker, read_manifest
from retrieval_service.dense.matching import Ids
from retrieval_service.dense.saving import PresentScopes, SavedScope, Saving
from retrieval_service.dense.scope_index import Document, FoundDocument, ScopeIndex, Snapshot
from retrieval_service.dense.storage import Before, read_scope
from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

PUBLIC = ""
"""The scope that everybody sees; no tenant is called so."""
_EMBEDDED_AT_ONCE = 512
_SAME_MODEL = 0.98
"""Least cosine of two vectors of one text by one model; rounding costs some thousandths at most."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How documents are cut for embedding: windows of `window` ids, one every `stride` ids."""

    window: int = 64
    stride: int = 32


CHUNKING = Chunking()
SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A scope with a damaged file, and what is wrong with that file."""

    stored: StoredScope
    why: str


class DocumentLibrary:
    """The embedded documents of all tenants."""

    def __init__(
        self,
        embedder: Embedder,
        tokenizer_digest: str,
        *,
        chunking: Chunking = CHUNKING,
        sizes: Sizes = SIZES,
    ) -> None:
        self.embedder = embedder
        self.chunking = chunking
        self.maker = Maker(
            embedder.name,
            embedder.digest,
            tokenizer_digest,
            embedder.dimensions,
            chunking.window,
            chunking.stride,
        )
        self._sizes = sizes
        self._lock = threading.Lock()
        self._scope_indexes: dict[str, ScopeIndex] = {}
        self._left_out: dict[str, _LeftOut] = {}
        self._saving = Saving(self.maker, self._present)

    @classmethod
    def load(
        cls,
        folder: Path,
        embedder: Embedder,
        tokenizer_digest: str,
        *,
        chunking: Chunking = CHUNKING,
        sizes: Sizes = SIZES,
    ) -> "DocumentLibrary":
        """The library in a folder of `save`. Raises NoLibrary, LibraryDamaged or LibraryMismatch.

        A scope with a damaged file is left out and logged. Its files stay until the scope is forgotten.
        """
        library = cls(embedder, tokenizer_digest, chunking=chunking, sizes=sizes)
        maker, generation, scope_indexes = read_manifest(folder)
        check_maker(folder, maker, library.maker)
        saved: dict[str, SavedScope] = {}
        is_checked = False
        for stored in scope_indexes:
            try:
                snapshot = read_scope(folder, stored, maker)
            except LibraryDamaged as error:
                log.error("the documents of %r are left out: %s", stored.tenant, error)
                library._left_out[stored.tenant] = _LeftOut(stored, str(error))
                continue
            is_checked = is_checked or library._check_embedder(folder, snapshot)
            scope_index = ScopeIndex.restored(snapshot, chunking.stride, sizes)
            library._scope_indexes[stored.tenant] = scope_index
            held = Before(stored, tuple(scope_index.documents()))
            saved[stored.tenant] = SavedScope(scope_index, scope_index.changes, held)
        library._saving.loaded(folder, generation, saved)
        return library

    def add(self, tenant: str, documents: Iterable[tuple[str, Sequence[int] | NDArray[Any]]]) -> int:
        """Adds documents, a name and ids each, to a tenant's scope or to PUBLIC; returns how many.

        A known name is replaced. Empty ones are left out. Raises EmbeddingsFailed or EmbeddingsUnfit,
        or InvalidRequest for a negative id; those before it are added. Raises LibraryDamaged for a scope that
        is left out.
        """
        scope_index = self._scope_index(tenant)
        count = 0
        for group in _groups(documents, self.chunking):
            windows = [window for _, windows in group for window in windows]
            vectors = self.embedder.embed(windows)
            scope_index.add(_with_vectors(group, vectors))
            count += len(group)
        return count

    def remove(self, tenant: str, *names: str) -> int:
        """Deletes documents; returns how many there were. On disk they go with the next `save`.

        Raises LibraryDamaged for a scope that is left out.
        """
        self._check_left_out(tenant)
        scope_index = self._scope_indexes.get(tenant)
        return 0 if scope_index is None else scope_index.remove(*names)

    def forget(self, tenant: str) -> int:
        """Deletes all of a tenant's documents; returns how many. On disk they go with the next `save`."""
        with self._lock:
            self._left_out.pop(tenant, None)
            scope_index = self._scope_indexes.pop(tenant, None)
        # A search that still reads the index finds documents that `holds` denies.
        return 0 if scope_index is None else len(scope_index)

    def __len__(self) -> int:
        """Number of documents, of all tenants."""
        with self._lock:
            return sum(map(len, self._scope_indexes.values()))

    def documents(self, tenant: str) -> list[Document]:
        """The documents of one scope, in order of adding."""
        scope_index = self._scope_indexes.get(tenant)
        return [] if scope_index is None else scope_index.documents()

    def search(self, tenant: str, vector: Vectors, count: int) -> list[FoundDocument]:
        """The documents nearest to a unit vector, of the tenant's own and the public ones, best first."""
        scope_indexes = [self._scope_indexes.get(scope) for scope in sorted({tenant, PUBLIC})]
        found = [
            one
            for scope_index in scope_indexes
            if scope_index is not None
            for one in scope_index.search(vector, count)
        ]
        return sorted(found, key=lambda one: (-one.score, one.document.name))[:count]

    def holds(self, tenant: str, document: Document) -> bool:
        """Whether this tenant may still copy from this very document; never waits."""
        own, public = self._scope_indexes.get(tenant), self._scope_indexes.get(PUBLIC)
        return (own is not None and own.holds(document)) or (public is not None and public.holds(document))

    def kinds(self) -> dict[str, str]:
        """The kind of index of each scope."""
        with self._lock:
            return {tenant: scope_index.kind for tenant, scope_index in self._scope_indexes.items()}

    def save(self, folder: Path, disk: Disk | None = None, *, tenants: Iterable[str] | None = None) -> None:
        """Saves the changes of these tenants, or of all, since the last save to this folder. Raises OSError.

        Searches, removals and saves of other tenants go on. Whenever it is stopped, `load` finds of each
        tenant what was saved before or all of this.
        """
        make_folder(folder)
        self._saving.save(folder, disk or Disk(), tenants)

    def _present(self) -> PresentScopes:
        with self._lock:
            left_out = [one.stored for one in self._left_out.values()]
            return PresentScopes(dict(self._scope_indexes), left_out)

    def _check_embedder(self, folder: Path, saved: Snapshot) -> bool:
        """Embeds the first saved window with a nonzero vector again, and compares the two vectors.

        A server can serve other weights under the same model name. Raises LibraryMismatch if the vectors
        differ; returns False if every saved vector is zero.
        """
        found = self._first_window(saved)
        if found is None:
            return False
        window, before = found
        now = self.embedder.embed([window])[0]
        if float(np.dot(before.astype(np.float32), now)) < _SAME_MODEL:
            raise LibraryMismatch(
                f"{folder}: {self.embedder.name} gives other vectors than those saved; use the model that"
                " made them, or remove the folder and add the documents again"
            )
        return True

    def _first_window(self, saved: Snapshot) -> tuple[Ids, NDArray[np.float16]] | None:
        """The first window whose vector is not zero, and that vector; None where all are zero."""
        for entry in saved.entries:
            for number, vector in enumerate(entry.vectors):
                if vector.any():
                    start = number * self.chunking.stride
                    return entry.document.ids[start : start + self.chunking.window], vector
        return None

    def _check_left_out(self, tenant: str) -> None:
        left_out = self._left_out.get(tenant)
        if left_out is not None:
            raise LibraryDamaged(left_out.why)

    def _scope_index(self, tenant: str) -> ScopeIndex:
        with self._lock:
            self._check_left_out(tenant)
            scope_index = self._scope_indexes.get(tenant)
            if scope_index is None:
                made = ScopeIndex(self.embedder.dimensions, self.chunking.stride, self._sizes)
                scope_index = self._scope_indexes[tenant] = made
            return scope_index


Windowed = tuple[Document, list[Ids]]


def _groups(
    documents: Iterable[tuple[str, Sequence[int] | NDArray[Any]]], chunking: Chunking
) -> Iterator[list[Windowed]]:
    """Documents cut into windows, in groups that are embedded at once."""
    group: list[Windowed] = []
    windows = 0
    for name, ids in documents:
        own = np.array(ids, dtype=np.int32)
        if not len(own):
            continue
        if own.min() < 0:
            raise InvalidRequest(f"document {name!r} holds the id {own.min()}; ids are not negative")
        own.flags.writeable = False
        cut = [own[at : at + chunking.window] for at in _starts(len(own), chunking)]
        group.append((Document(name, own), cut))
        windows += len(cut)
        if windows >= _EMBEDDED_AT_ONCE:
            yield group
            group, windows = [], 0
    if group:
        yield group


def _starts(length: int, chunking: Chunking) -> range:
    """Starts of a document's windows; the last window reaches the end."""
    beyond = max(0, length - chunking.window)
    return range(0, beyond + chunking.stride, chunking.stride) if beyond else range(1)


def _with_vectors(group: list[Windowed], vectors: Vectors) -> Iterator[tuple[Document, Vectors]]:
    at = 0
    for document, windows in group:
        yield document, vectors[at : at + len(windows)]
        at += len(windows)
