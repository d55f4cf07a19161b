"""Scopes are saved beside each other: what fails or is forgotten in one costs no other one a document."""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from retrieval_service.corpus.disk import Disk
from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.index import Sizes
from retrieval_service.dense.library import Chunking, DocumentLibrary
from retrieval_service.dense.manifest import MANIFEST, read_manifest
from tests.retrieval.corpus.support.stepping_disk import SteppingDisk

CHUNKING = Chunking(window=8, stride=4)
SIZES = Sizes(flat=20, hnsw=60)
WAIT_S = 60.0


@pytest.fixture
def library(embedder: TableEmbedder) -> DocumentLibrary:
    return DocumentLibrary(embedder, "tokens", chunking=CHUNKING, sizes=SIZES)


def on_disk(folder: Path, embedder: TableEmbedder) -> dict[str, set[str]]:
    """Names of the documents that the folder's library has, by tenant."""
    loaded = DocumentLibrary.load(folder, embedder, "tokens", chunking=CHUNKING, sizes=SIZES)
    return {tenant: {one.name for one in loaded.documents(tenant)} for tenant in loaded.kinds()}


def unnamed(folder: Path) -> set[str]:
    """Names of the files that no manifest names."""
    named = {name for scope in read_manifest(folder)[2] for name in scope.files}
    return {path.name for path in folder.iterdir()} - named - {MANIFEST, f"{MANIFEST}.tmp"}


class FullOnce(SteppingDisk):
    """A disk whose n-th change fails, as on a full disk that has room again afterwards."""

    def __init__(self, change: int) -> None:
        self.left = change

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("change", [lambda one: one.remove("a", "0"), lambda one: one.add("a", [("9", [9])])])
def test_a_save_that_fails_anywhere_costs_no_tenant_a_document(
    embedder: TableEmbedder, tmp_path: Path, change: Callable[[DocumentLibrary], object]
) -> None:
    for step in range(200):
        folder = tmp_path / f"{step}"
        library = DocumentLibrary(embedder, "tokens", chunking=CHUNKING, sizes=SIZES)
        library.add("a", [(f"{number}", [number]) for number in range(3)])
        library.add("b", [("one", [1])])
        library.save(folder)
        change(library)
        disk = FullOnce(step)
        try:
            library.save(folder, disk, tenants=["a"])
        except OSError:
            assert on_disk(folder, embedder)["b"] == {"one"}
        library.add("b", [("two", [2])])
        library.save(folder, tenants=["b"])
        saved = on_disk(folder, embedder)
        assert saved["b"] == {"one", "two"}
        assert saved["a"] in ({"0", "1", "2"}, {one.name for one in library.documents("a")})
        assert not unnamed(folder)
        library.save(folder, tenants=["a"])
        assert on_disk(folder, embedder)["a"] == {one.name for one in library.documents("a")}
        if disk.left >= 0:
            break
    assert step > 10


def test_saves_that_fail_again_and_again_leave_no_files(
    embedder: TableEmbedder, library: DocumentLibrary, tmp_path: Path
) -> None:
    class NoManifest(Disk):
        def put(self, path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    library.add("a", [("one", [1])])
    library.save(tmp_path)
    for number in range(3):
        library.add("a", [(f"{number}", [number])])
        with pytest.raises(OSError, match="No space"):
            library.save(tmp_path, NoManifest(), tenants=["a"])
        assert not unnamed(tmp_path)


class Waiting(Disk):
    """A Disk that waits before it makes a scope's file of ids."""

    def __init__(self) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()

    def create(self, path: Path) -> BinaryIO:
        if path.suffix == ".ids":
            self.writing.set()
            assert self.go_on.wait(WAIT_S)
        return super().create(path)


def test_others_save_while_a_scope_is_written(
    embedder: TableEmbedder, library: DocumentLibrary, tmp_path: Path
) -> None:
    slow = Waiting()
    library.add("a", [("one", [1])])
    library.add("b", [("one", [1])])
    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(library.save, tmp_path, slow, tenants=["a"])
            assert slow.writing.wait(WAIT_S)
            pool.submit(library.save, tmp_path, tenants=["b"]).result(WAIT_S / 4)
            assert on_disk(tmp_path, embedder) == {"b": {"one"}}
        finally:
            slow.go_on.set()
        first.result(WAIT_S)
    assert on_disk(tmp_path, embedder) == {"a": {"one"}, "b": {"one"}}
    assert not unnamed(tmp_path)


@pytest.mark.parametrize("comes_again", [False, True])
def test_what_is_forgotten_while_it_is_written_is_gone_from_the_disk(
    embedder: TableEmbedder, library: DocumentLibrary, tmp_path: Path, comes_again: bool
) -> None:
    slow, forgetting = Waiting(), threading.Event()
    library.add("a", [("secret name", list(range(100, 120)))])

    def forget() -> list[bytes]:
        library.forget("a")
        if comes_again:
            library.add("a", [("new", [1])])
        forgetting.set()
        library.save(tmp_path, tenants=["a"])
        return [path.read_bytes() for path in tmp_path.iterdir()]

    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(library.save, tmp_path, slow, tenants=["a"])
            assert slow.writing.wait(WAIT_S)
            second = pool.submit(forget)
            assert forgetting.wait(WAIT_S)
        finally:
            slow.go_on.set()
        first.result(WAIT_S)
        left = second.result(WAIT_S)
    text = np.arange(100, 120, dtype=np.int32).tobytes()
    assert not any(b"secret name" in data or text in data for data in left)
    assert on_disk(tmp_path, embedder) == ({"a": {"new"}} if comes_again else {})


def test_any_history_of_calls_at_once_ends_on_the_disk_as_in_memory(
    embedder: TableEmbedder, library: DocumentLibrary, tmp_path: Path
) -> None:
    library.save(tmp_path)

    def live(seed: int) -> None:
        drawn = np.random.default_rng(seed)
        tenant = "abc"[seed % 3]
        for _ in range(25):
            name, kind = f"{drawn.integers(0, 12)}", drawn.random()
            if kind < 0.6:
                library.add(tenant, [(name, drawn.integers(0, 200, 20).tolist())])
            elif kind < 0.9:
                library.remove(tenant, name)
            else:
                library.forget(tenant)
            library.save(tmp_path, tenants=[tenant])

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(live, seed) for seed in range(6)]:
            done.result(WAIT_S)
    expected = {tenant: {one.name for one in library.documents(tenant)} for tenant in library.kinds()}
    assert on_disk(tmp_path, embedder) == expected
    assert not unnamed(tmp_path)
