"""Documents of all tenants: added, removed and kept on disk while sessions copy from them."""

import threading
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from outrider.folder_lock import FolderLock
from retrieval_service.dense.embeddings import Embedder
from retrieval_service.dense.errors import NoLibrary
from retrieval_service.dense.library import DocumentLibrary
from retrieval_service.dense.near_documents import NearDocuments
from speculative.errors import Overloaded, Unavailable

RETRY_AFTER_S = 60.0
LEAST_CHARGED = 16
"""Tokens that a document counts as at least: its name and its place take memory, too."""


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Most tokens of documents to hold; further documents are refused, since none is ever evicted."""

    tokens: int
    """Of all tenants together."""
    tokens_of_tenant: int
    """Of one tenant."""


class Documents:
    """The documents of all tenants, within limits and on disk. Safe from several threads.

    Args:
        embedder: turns documents into vectors, by which near ones are found.
        folder: where documents are kept; None: in memory alone.

    Attributes:
        near: the sessions that copy from these documents.

    Raises:
        DenseError: what the folder holds cannot be used.
        FolderInUse: another process has the folder: it would remove what this one saves.
        OSError: the folder cannot be read or written.
    """

    def __init__(
        self, embedder: Embedder, tokenizer_digest: str, folder: Path | None, limits: DocumentLimits
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._library = DocumentLibrary(embedder, tokenizer_digest)
        self._lock: FolderLock | None = None
        if folder is not None:
            self._lock = FolderLock(folder)
            try:
                self._open(folder, embedder, tokenizer_digest)
            except BaseException:
                self._lock.close()
                raise
        self.near = NearDocuments(self._library)
        self._changing = threading.Lock()
        self._saves = 0
        self._closed = False
        self._held = {name: self._count(name) for name in self._library.kinds()}
        self._coming: dict[str, list[dict[str, int]]] = {}
        """Tokens of the documents that are being added, by owner, addition and name."""

    def add(self, owner: str, documents: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Adds documents, a name and ids each, in memory; `save` them in the end.

        Returns:
            The number of documents that the owner has then.

        Raises:
            Overloaded: there is no room for all of them; none was added.
            EmbeddingsFailed, EmbeddingsUnfit: the embeddings server did not answer; the first ones may have
                been added.
        """
        # Embedding takes long, and neither other tenants nor removals wait for it.
        coming = {name: self.charged(ids) for name, ids in documents}
        with self._changing:
            self._check_room(owner, coming)
            self._coming.setdefault(owner, []).append(coming)
        try:
            self._library.add(owner, documents)
        finally:
            with self._changing:
                self._came(owner, coming)
                count = self._counted(owner)
        return count

    @staticmethod
    def charged(ids: Sized) -> int:
        """Tokens that a document counts as within the limits."""
        return max(LEAST_CHARGED, len(ids))

    def save(self, owner: str) -> None:
        """Saves an owner's additions and removals to the folder, if there is one.

        Raises OSError, and Unavailable after `close`.
        Other owners wait for moments only, whatever this owner's index takes.
        """
        if self._folder is None:
            return
        with self._changing:
            if self._closed:
                raise Unavailable(f"{self._folder} is closed, as the worker ends: ask again")
            self._saves += 1
        try:
            self._library.save(self._folder, tenants=[owner])
        finally:
            with self._changing:
                self._saves -= 1
                self._release()

    def remove(self, owner: str, names: Sequence[str]) -> int:
        """Removes an owner's documents of these names, or all without names, in memory; `save` in the end.

        Waits for no index that is being built already.

        Returns:
            The number of documents removed.
        """
        # Outside the lock: a large index that is built anew takes minutes.
        removed = self._library.remove(owner, *names) if names else self._library.forget(owner)
        with self._changing:
            self._counted(owner)
        return removed

    def close(self) -> None:
        """Ends the search, and releases the folder once no save is under way. `save` before."""
        self.near.close()
        with self._changing:
            self._closed = True
            self._release()

    def _release(self) -> None:
        # Another process that had the folder during a save would lose documents, or this one would.
        if self._closed and not self._saves and self._lock is not None:
            self._lock.close()

    def _open(self, folder: Path, embedder: Embedder, tokenizer_digest: str) -> None:
        try:
            self._library = DocumentLibrary.load(folder, embedder, tokenizer_digest)
        except NoLibrary:
            self._library.save(folder)

    def _check_room(self, owner: str, coming: Mapping[str, int]) -> None:
        expected = {one.name: self.charged(one.ids) for one in self._library.documents(owner)}
        for addition in (*self._coming.get(owner, ()), coming):
            expected |= addition
        own = sum(expected.values())
        others = sum(tokens for name, (_, tokens) in self._held.items() if name != owner)
        others += sum(
            sum(addition.values())
            for name, additions in self._coming.items()
            for addition in additions
            if name != owner
        )
        for tokens, most, whose in (
            (own, self._limits.tokens_of_tenant, "of one tenant"),
            (others + own, self._limits.tokens, "of all tenants"),
        ):
            if tokens > most:
                raise Overloaded(
                    f"documents {whose} would have {tokens} tokens; at most {most} are kept: remove some",
                    RETRY_AFTER_S,
                )

    def _came(self, owner: str, addition: dict[str, int]) -> None:
        """Notes that an addition has ended: what it added counts as held."""
        left = [one for one in self._coming[owner] if one is not addition]
        if left:
            self._coming[owner] = left
        else:
            del self._coming[owner]

    def _counted(self, owner: str) -> int:
        self._held[owner] = self._count(owner)
        return self._held[owner][0]

    def _count(self, owner: str) -> tuple[int, int]:
        documents = self._library.documents(owner)
        return len(documents), sum(self.charged(one.ids) for one in documents)
