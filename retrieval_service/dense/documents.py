"""Documents of all tenants: added, removed and kept on disk while sessions copy from them."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.folder_lock import FolderLock
from retrieval_service.dense.embeddings import Embedder
from retrieval_service.dense.errors import NoLibrary
from retrieval_service.dense.library import DocumentLibrary
from retrieval_service.dense.near_documents import NearDocuments
from speculative.errors import Overloaded, Unavailable

log = logging.getLogger(__name__)

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
        self._under_way = 0
        """Changes and saves that have begun and not ended."""
        self._closed = False
        self._ended = threading.Event()
        self._unsaved: set[str] = set()
        """Owners who changed something since their last save began, or whose last save failed."""
        self._held = {name: self._count(name) for name in self._library.kinds()}
        self._coming: dict[str, list[dict[str, int]]] = {}
        """Tokens of the documents that are being added, by owner, addition and name."""

    def add(self, owner: str, documents: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Adds documents, a name and ids each, in memory; `save` them in the end.

        Returns:
            The number of documents that the owner has then.

        Raises:
            Overloaded: there is no room for all of them; none was added.
            Unavailable: after `close`.
            EmbeddingsFailed, EmbeddingsUnfit: the embeddings server did not answer; the first ones may have
                been added.
        """
        # Embedding takes long, and neither other tenants nor removals wait for it.
        coming = {name: self.charged(ids) for name, ids in documents}
        with self._begun():
            with self._changing:
                self._check_room(owner, coming)
                self._coming.setdefault(owner, []).append(coming)
            try:
                self._library.add(owner, documents)
            finally:
                with self._changing:
                    self._came(owner, coming)
                    count = self._changed(owner)
        return count

    @staticmethod
    def charged(ids: Sized) -> int:
        """Tokens that a document counts as within the limits."""
        return max(LEAST_CHARGED, len(ids))

    def save(self, owner: str) -> None:
        """Saves an owner's changes to the folder, if there is one.

        Raises OSError, and Unavailable after `close`.
        Other owners wait for moments only, whatever this owner's index takes.
        """
        with self._begun():
            self._save(owner)

    def remove(self, owner: str, names: Sequence[str]) -> int:
        """Removes an owner's documents of these names, or all without names, and saves that.

        Removing from memory does not wait for an index that is being built. Raises OSError if the removal
        cannot be saved, and Unavailable after `close`, with nothing removed.

        Returns:
            The number of documents removed.
        """
        with self._begun():
            try:
                # Outside the lock: a large index that is built anew takes minutes.
                removed = self._library.remove(owner, *names) if names else self._library.forget(owner)
            finally:
                with self._changing:
                    self._changed(owner)
            self._save(owner)
        return removed

    def close(self, timeout: float = 60.0) -> None:
        """Ends the search; once no change is under way, saves what is not saved and releases the folder.

        Waits for that, `timeout` seconds at most.
        """
        self.near.close()
        with self._changing:
            self._closed = True
            is_last = not self._under_way
        if is_last:
            self._end()
        self._ended.wait(timeout)

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Context of a change or a save, which the end waits for. Raises Unavailable after `close`."""
        with self._changing:
            if self._closed:
                raise Unavailable("the library of documents is closed, as the worker ends: ask again")
            self._under_way += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changing:
            self._under_way -= 1
            is_last = self._closed and not self._under_way
        if is_last:
            self._end()

    def _save(self, owner: str) -> None:
        if self._folder is None:
            return
        with self._changing:
            self._unsaved.discard(owner)
        try:
            self._library.save(self._folder, tenants=[owner])
        except BaseException:
            with self._changing:
                self._unsaved.add(owner)
            raise

    def _end(self) -> None:
        """Saves once more what calls left unsaved, and releases the folder."""
        if self._ended.is_set():
            return
        try:
            for owner in sorted(self._unsaved):
                try:
                    self._save(owner)
                except Exception as error:  # of one owner; the others' changes are saved all the same
                    log.error("changes of the documents of %r are lost: %s", owner, error)
        finally:
            # Not before: another process that had the folder during a save would lose documents.
            if self._lock is not None:
                self._lock.close()
            self._ended.set()

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

    def _changed(self, owner: str) -> int:
        """Notes that an owner's documents changed; returns how many there are."""
        self._unsaved.add(owner)
        self._held[owner] = self._count(owner)
        return self._held[owner][0]

    def _count(self, owner: str) -> tuple[int, int]:
        documents = self._library.documents(owner)
        return len(documents), sum(self.charged(one.ids) for one in documents)
