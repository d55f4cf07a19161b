"""Documents within their limits, while others are added, removed, and refused by the embeddings server."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.folder_lock import FolderInUse
from retrieval_service.dense.documents import DocumentLimits, Documents
from retrieval_service.dense.embeddings import TableEmbedder, Vectors
from retrieval_service.dense.errors import EmbeddingsFailed, LibraryMismatch
from retrieval_service.dense.index import VectorIndex
from retrieval_service.dense.library import DocumentLibrary
from retrieval_service.dense.storage import write_scope
from speculative.errors import Overloaded, Unavailable
from tests.retrieval.dense.held import Held

WAIT_S = 60.0
LIMITS = DocumentLimits(tokens=100, tokens_of_tenant=60)
SLOW = 7
"""An id whose embedding takes until a test lets it go on."""
REFUSED = 8
"""An id that the embeddings server does not take."""


class Server:
    """An embeddings server over a table, slow with some ids and without an answer for others."""

    def __init__(self, embedder: TableEmbedder) -> None:
        self._embedder = embedder
        self.name, self.digest, self.dimensions = embedder.name, embedder.digest, embedder.dimensions
        self.asked, self.go_on = threading.Event(), threading.Event()

    def embed(self, windows: Sequence[Sequence[int] | np.ndarray[Any, Any]]) -> Vectors:
        if any(REFUSED in window for window in windows):
            raise EmbeddingsFailed("on purpose")
        if any(SLOW in window for window in windows):
            self.asked.set()
            assert self.go_on.wait(WAIT_S)
        return self._embedder.embed(windows)


@pytest.fixture
def server(embedder: TableEmbedder) -> Server:
    return Server(embedder)


@pytest.fixture
def documents(server: Server) -> Iterator[Documents]:
    documents = Documents(server, "digest", None, LIMITS)
    yield documents
    documents.near.close()


Start = Callable[..., "Future[int]"]


@pytest.fixture
def start(server: Server, documents: Documents) -> Iterator[Start]:
    """Begins to add documents whose embedding takes long."""
    with ThreadPoolExecutor() as pool:

        def begin(owner: str, name: str = "slow", tokens: int = 40) -> "Future[int]":
            server.asked.clear()
            adding = pool.submit(documents.add, owner, [(name, [SLOW] * tokens)])
            assert server.asked.wait(WAIT_S)
            return adding

        yield begin
        server.go_on.set()


def test_nobody_waits_for_documents_that_are_being_embedded(
    server: Server, documents: Documents, start: Start
) -> None:
    documents.add("a", [("first", [1] * 20)])
    adding = start("a")
    assert documents.add("b", [("one", [1] * 20), ("two", [2] * 20)]) == 2
    assert documents.remove("b", ["one", "none"]) == 1
    assert documents.remove("a", []) == 1
    assert not adding.done()
    server.go_on.set()
    assert adding.result(WAIT_S) == 0, "what was removed meanwhile does not come back"


def test_nobody_waits_for_an_index_that_is_built_anew_without_what_was_removed(
    documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Held(VectorIndex.build)

    documents.add("a", [("one", [1] * 16), ("two", [2] * 16)])
    documents.add("b", [("one", [1] * 16)])
    monkeypatch.setattr(VectorIndex, "build", build)
    with ThreadPoolExecutor() as pool:
        try:
            removing = pool.submit(documents.remove, "a", ["one"])
            assert build.begun.wait(WAIT_S)
            assert pool.submit(documents.add, "b", [("two", [2] * 16)]).result(WAIT_S / 4) == 2
            assert pool.submit(documents.remove, "c", []).result(WAIT_S / 4) == 0
            assert not removing.done()
        finally:
            build.go_on.set()
        assert removing.result(WAIT_S) == 1


def test_nobody_waits_to_save_while_another_ones_index_is_built_anew(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Held(VectorIndex.build)

    def saved() -> dict[str, list[str]]:
        library = DocumentLibrary.load(tmp_path, server, "digest")
        return {owner: [one.name for one in library.documents(owner)] for owner in ("a", "b", "c")}

    with closing(Documents(server, "digest", tmp_path, LIMITS)) as documents, ThreadPoolExecutor() as pool:
        for owner, name in (("a", "one"), ("a", "two"), ("b", "one"), ("c", "one")):
            documents.add(owner, [(name, [1] * 16)])
            documents.save(owner)
        with monkeypatch.context() as slowly:
            slowly.setattr(VectorIndex, "build", build)
            try:
                removing = pool.submit(documents.remove, "a", ["one"])
                assert build.begun.wait(WAIT_S)
                documents.add("b", [("two", [2] * 16)])
                pool.submit(documents.save, "b").result(WAIT_S / 4)
                assert pool.submit(documents.remove, "c", []).result(WAIT_S / 4) == 1
            finally:
                build.go_on.set()
        assert removing.result(WAIT_S) == 1
        assert saved() == {"a": ["two"], "b": ["one", "two"], "c": []}


def test_documents_that_are_being_embedded_take_their_room(
    server: Server, documents: Documents, start: Start
) -> None:
    adding = start("a")
    with pytest.raises(Overloaded, match="of one tenant would have 61 tokens"):
        documents.add("a", [("more", [1] * 21)])
    assert documents.add("a", [("more", [1] * 20)]), "both together are within the limit"
    with pytest.raises(Overloaded, match="of all tenants would have 101 tokens"):
        documents.add("b", [("more", [1] * 41)])
    server.go_on.set()
    assert adding.result(WAIT_S) == 2


def test_two_additions_of_one_document_take_its_room_once(
    server: Server, documents: Documents, start: Start
) -> None:
    one, two = start("a"), start("a")
    server.go_on.set()
    assert {one.result(WAIT_S), two.result(WAIT_S)} == {1}
    assert documents.add("a", [("more", [1] * 20)]) == 2


def test_what_was_added_before_the_server_failed_counts(server: Server) -> None:
    limits = DocumentLimits(tokens=40_000, tokens_of_tenant=40_000)
    documents = Documents(server, "digest", None, limits)
    with pytest.raises(EmbeddingsFailed):
        documents.add("a", [("long", [1] * 20_000), ("refused", [REFUSED] * 40)])
    with pytest.raises(Overloaded, match="of all tenants would have 40001 tokens"):
        documents.add("b", [("more", [1] * 20_001)])
    documents.near.close()


def test_a_folder_belongs_to_one_worker_until_it_ends(server: Server, tmp_path: Path) -> None:
    first = Documents(server, "digest", tmp_path, LIMITS)
    first.add("a", [("one", [1, 2, 3])])
    first.save("a")
    with pytest.raises(FolderInUse, match=rf"in use by another process \(pid {os.getpid()}\)"):
        Documents(server, "digest", tmp_path, LIMITS)
    first.close()
    with pytest.raises(LibraryMismatch):
        Documents(server, "another", tmp_path, LIMITS)
    second = Documents(server, "digest", tmp_path, LIMITS)
    assert second.near.count == 1, "one that could not read the folder has left it"
    second.close()


def test_a_folder_is_released_only_when_the_last_save_has_ended(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Held(write_scope)
    documents = Documents(server, "digest", tmp_path, LIMITS)
    documents.add("a", [("one", [1, 2, 3])])
    monkeypatch.setattr("retrieval_service.dense.saving.write_scope", write)
    with ThreadPoolExecutor() as pool:
        try:
            saving = pool.submit(documents.save, "a")
            assert write.begun.wait(WAIT_S)
            documents.close(timeout=0)
            with pytest.raises(FolderInUse):
                Documents(server, "digest", tmp_path, LIMITS)
            with pytest.raises(Unavailable, match="is closed"):
                documents.save("a")
        finally:
            write.go_on.set()
        saving.result(WAIT_S)
    again = Documents(server, "digest", tmp_path, LIMITS)
    assert again.near.count == 1
    again.close()


def test_what_no_save_can_take_in_the_end_costs_no_other_owner_a_document(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents(server, "digest", tmp_path, LIMITS)
    for owner in ("a", "b"):
        documents.add(owner, [("one", [1] * 16)])

    def scarce(*given: Any) -> Any:
        if "a" in given:
            raise MemoryError
        return write_scope(*given)

    with monkeypatch.context() as memory:
        memory.setattr("retrieval_service.dense.saving.write_scope", scarce)
        documents.close()
    again = Documents(server, "digest", tmp_path, LIMITS)
    assert again.near.count == 1
    again.close()


def test_what_was_not_saved_is_saved_in_the_end(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    documents = Documents(server, "digest", tmp_path, LIMITS)
    for owner in ("a", "b"):
        documents.add(owner, [("one", [1] * 16)])
    with monkeypatch.context() as disk:
        disk.setattr("retrieval_service.dense.saving.write_scope", full)
        with pytest.raises(OSError, match="No space left"):
            documents.save("a")
    documents.close()
    with closing(Documents(server, "digest", tmp_path, LIMITS)) as again:
        assert again.near.count == 2


def test_a_change_that_goes_on_in_the_end_is_saved(server: Server, tmp_path: Path) -> None:
    documents = Documents(server, "digest", tmp_path, LIMITS)
    with ThreadPoolExecutor() as pool:
        try:
            adding = pool.submit(documents.add, "a", [("slow", [SLOW] * 16)])
            assert server.asked.wait(WAIT_S)
            documents.close(timeout=0)
        finally:
            server.go_on.set()
        assert adding.result(WAIT_S) == 1
    with pytest.raises(Unavailable, match="is closed"):
        documents.add("a", [("late", [1] * 16)])
    with closing(Documents(server, "digest", tmp_path, LIMITS)) as again:
        assert again.near.count == 1
