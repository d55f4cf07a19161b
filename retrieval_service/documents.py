"""Reference documents of all tenants: added, removed and kept on disk while sessions copy from them."""

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrieval_service.dense.embeddings import Embedder
from retrieval_service.dense.errors import NoLibrary
from retrieval_service.dense.library import Library
from retrieval_service.dense.references import References
from retrieval_service.holdings import scope
from retrieval_service.memories import Memory
from speculative.errors import Overloaded

RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Room:
    """How many ids of documents are taken on; more are refused, as nothing that was added is evicted."""

    tokens: int
    tokens_of_tenant: int


class Documents:
    """The library, and what sessions draw from it. A ReferenceMemory; safe from several threads.

    Args:
        embedder: says what is near.
        folder: where documents are kept; None: in memory alone.

    Raises:
        DenseError: what the folder holds cannot be used.
    """

    def __init__(self, embedder: Embedder, tokenizer_digest: str, folder: Path | None, room: Room) -> None:
        self._folder = folder
        self._room = room
        self._library = Library(embedder, tokenizer_digest)
        if folder is not None:
            try:
                self._library = Library.load(folder, embedder, tokenizer_digest)
            except NoLibrary:
                self._library.save(folder)
        self._references = References(self._library)
        self._changing = threading.Lock()
        self._held = {name: self._count(name) for name in self._library.kinds()}

    @property
    def count(self) -> int:
        """Documents of all tenants."""
        return sum(count for count, _ in list(self._held.values()))

    def add(self, tenant: str, documents: Sequence[tuple[str, Sequence[int]]]) -> int:
        """Adds documents, name and ids each; returns how many the tenant has then. `keep` them in the end.

        Raises Overloaded where there is no room for them; then none is added.
        """
        owner = scope(tenant)
        with self._changing:
            self._check_room(owner, documents)
            self._library.add(owner, documents)
            return self._counted(owner)

    def keep(self) -> None:
        """Writes what was added or removed, if there is where to. Raises OSError."""
        if self._folder is not None:
            self._library.save(self._folder)

    def remove(self, tenant: str, names: Sequence[str]) -> int:
        """Removes documents, all of them where none is named, from disk too; returns how many were there."""
        owner = scope(tenant)
        with self._changing:
            before, _ = self._held.get(owner, (0, 0))
            for name in names:
                self._library.remove(owner, name)
            if not names:
                self._library.forget(owner)
            left = self._counted(owner)
        self.keep()
        return before - left

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

    def _check_room(self, owner: str, documents: Sequence[tuple[str, Sequence[int]]]) -> None:
        held = {one.name: len(one.ids) for one in self._library.documents(owner)}
        own = sum((held | {name: len(ids) for name, ids in documents}).values())
        others = sum(tokens for name, (_, tokens) in self._held.items() if name != owner)
        for tokens, most, whose in (
            (own, self._room.tokens_of_tenant, "of one tenant"),
            (others + own, self._room.tokens, "of all tenants"),
        ):
            if tokens > most:
                raise Overloaded(
                    f"references {whose} would have {tokens} ids; {most} are taken on: remove some",
                    RETRY_AFTER_S,
                )

    def _counted(self, owner: str) -> int:
        self._held[owner] = self._count(owner)
        return self._held[owner][0]

    def _count(self, owner: str) -> tuple[int, int]:
        documents = self._library.documents(owner)
        return len(documents), sum(len(one.ids) for one in documents)
