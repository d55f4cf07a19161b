"""Reference documents of all tenants: added, removed and kept on disk while sessions copy from them."""

import threading
from collections.abc import Hashable, Sequence
from pathlib import Path

from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.errors import NoLibrary
from retrieval_service.dense.library import Library
from retrieval_service.dense.references import References
from retrieval_service.holdings import scope
from retrieval_service.memories import Memory


class Documents:
    """The library, and what sessions draw from it. A ReferenceMemory; safe from several threads.

    Args:
        model: a Hugging Face folder, whose embedding table says what is near.
        folder: where documents are kept; None: in memory alone.

    Raises:
        DenseError: the table, or what the folder holds, cannot be used.
    """

    def __init__(self, model: Path, tokenizer_digest: str, folder: Path | None) -> None:
        embedder = TableEmbedder.read(model)
        self._folder = folder
        self._library = Library(embedder, tokenizer_digest)
        if folder is not None:
            try:
                self._library = Library.load(folder, embedder, tokenizer_digest)
            except NoLibrary:
                self._library.save(folder)
        self._references = References(self._library)
        self._counting = threading.Lock()
        self._counts = {name: len(self._library.documents(name)) for name in self._library.kinds()}

    @property
    def count(self) -> int:
        """Documents of all tenants."""
        return sum(self._counts.values())

    def add(self, tenant: str, documents: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Adds documents, name and ids each, and keeps them; returns how many the tenant has then."""
        self._library.add(scope(tenant), documents)
        return self._changed(tenant)

    def remove(self, tenant: str, names: Sequence[str]) -> int:
        """Removes documents, all of them where none is named; returns how many were there."""
        before = self._counts.get(scope(tenant), 0)
        if names:
            for name in names:
                self._library.remove(scope(tenant), name)
        else:
            self._library.forget(scope(tenant))
        return before - self._changed(tenant)

    def follow(self, session: Hashable, tenant: str, ids: Sequence[int]) -> Memory:
        """See ReferenceMemory."""
        return self._references.follow(session, scope(tenant), ids)

    def progress(self, session: Hashable, ids: Sequence[int]) -> None:
        """See ReferenceMemory."""
        self._references.progress(session, ids)

    def end(self, session: Hashable) -> None:
        """See ReferenceMemory."""
        self._references.end(session)

    def close(self) -> None:
        """Ends the search's thread."""
        self._references.close()

    def _changed(self, tenant: str) -> int:
        count = len(self._library.documents(scope(tenant)))
        with self._counting:
            self._counts[scope(tenant)] = count
        if self._folder is not None:
            self._library.save(self._folder)
        return count
