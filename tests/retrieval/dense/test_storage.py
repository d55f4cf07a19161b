"""What is saved comes back whole, or is refused with the name of the file."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from retrieval_service.corpus.disk import Disk
from retrieval_service.dense.embeddings import TableEmbedder
from retrieval_service.dense.errors import LibraryDamaged, LibraryMismatch, NoLibrary
from retrieval_service.dense.index import Sizes
from retrieval_service.dense.library import PUBLIC, Chunking, DocumentLibrary
from retrieval_service.dense.manifest import MANIFEST, forget_scope, read_manifest
from retrieval_service.dense.storage import MOST_STEMS
from tests.retrieval.corpus.support.stepping_disk import SteppingDisk

CHUNKING = Chunking(window=8, stride=4)
SIZES = Sizes(flat=20, hnsw=60)
Contents = dict[str, dict[str, list[int]]]


def fresh(embedder: TableEmbedder) -> DocumentLibrary:
    return DocumentLibrary(embedder, "tokens", chunking=CHUNKING, sizes=SIZES)


def load(folder: Path, embedder: TableEmbedder) -> DocumentLibrary:
    return DocumentLibrary.load(folder, embedder, "tokens", chunking=CHUNKING, sizes=SIZES)


def contents(library: DocumentLibrary) -> Contents:
    found = {
        tenant: {document.name: document.ids.tolist() for document in library.documents(tenant)}
        for tenant in ("", "a", "b")
    }
    return {tenant: documents for tenant, documents in found.items() if documents}


@pytest.fixture
def library(embedder: TableEmbedder) -> DocumentLibrary:
    """A library of three scopes, with an index of each kind."""
    library = fresh(embedder)
    drawn = np.random.default_rng(1)
    for tenant, count in ((PUBLIC, 3), ("a", 10), ("b", 30)):
        library.add(tenant, [(f"{n}", drawn.integers(0, 200, 20).tolist()) for n in range(count)])
    assert sorted(library.kinds().values()) == ["flat", "hnsw", "ivfpq"]
    return library


def test_what_was_saved_is_loaded_and_found_alike(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path
) -> None:
    library.save(tmp_path)
    loaded = load(tmp_path, embedder)
    assert contents(loaded) == contents(library)
    assert loaded.kinds() == library.kinds()
    for tenant in ("a", "b", "c"):
        for document in library.documents(tenant)[:5]:
            vector = embedder.embed([document.ids[:8]])[0]
            found, again = library.search(tenant, vector, 5), loaded.search(tenant, vector, 5)
            assert [(one.document.name, one.start) for one in found] == [
                (one.document.name, one.start) for one in again
            ]


def test_changes_after_loading_are_saved_too(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path
) -> None:
    library.save(tmp_path)
    second = load(tmp_path, embedder)
    second.remove("a", "4")
    second.add(PUBLIC, [("new", [1, 2, 3])])
    second.save(tmp_path)
    assert contents(load(tmp_path, embedder)) == contents(second)
    assert contents(second) != contents(library)


def test_a_scope_that_did_not_change_is_not_written_again(library: DocumentLibrary, tmp_path: Path) -> None:
    library.save(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    library.add("a", [("new", [1, 2, 3])])
    library.save(tmp_path)
    after = {path.name for path in tmp_path.iterdir()}
    assert len(before & after) == len(before) - 4
    assert len(after) == len(before)


def test_what_was_added_is_written_alone_and_now_and_then_all_of_it(
    embedder: TableEmbedder, tmp_path: Path
) -> None:
    library = DocumentLibrary(embedder, "tokens", chunking=CHUNKING)
    written = []
    for number in range(MOST_STEMS + 9):
        before = {path.name: path.read_bytes() for path in tmp_path.glob("*-*")}
        library.add("a", [(f"{number}", [number, 2, 3])])
        library.save(tmp_path)
        new = [path for path in tmp_path.glob("*.ids") if path.name not in before]
        written.append(sum(path.stat().st_size for path in new))
    assert sorted(written)[:-1] == [12] * (len(written) - 1), "three ids of four bytes"
    assert max(written) == written[MOST_STEMS] == 12 * (MOST_STEMS + 1)
    loaded = DocumentLibrary.load(tmp_path, embedder, "tokens", chunking=CHUNKING)
    assert contents(loaded) == contents(library)
    loaded.add("a", [("new", [7, 8])])
    loaded.remove("a", "3")
    loaded.add("a", [("5", [9, 9])])
    loaded.save(tmp_path)
    assert len(list(tmp_path.glob("*.ids"))) == 1, "more than additions: written as a whole"
    again = DocumentLibrary.load(tmp_path, embedder, "tokens", chunking=CHUNKING)
    assert contents(again) == contents(loaded)
    for name in ("0", "new", "5"):
        (document,) = [one for one in again.documents("a") if one.name == name]
        found = again.search("a", embedder.embed([document.ids])[0], 1)[0].document
        assert found.ids.tolist() == document.ids.tolist()


def test_a_scope_that_was_added_to_often_keeps_few_files_open(
    embedder: TableEmbedder, tmp_path: Path
) -> None:
    library = DocumentLibrary(embedder, "tokens", chunking=CHUNKING)
    for number in range(MOST_STEMS - 1):
        library.add("a", [(f"{number}", [number, 2, 3])])
        library.save(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    loaded = DocumentLibrary.load(tmp_path, embedder, "tokens", chunking=CHUNKING)
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    assert contents(loaded) == contents(library)


def test_a_scope_made_anew_is_not_taken_for_the_old_one(embedder: TableEmbedder, tmp_path: Path) -> None:
    library = fresh(embedder)
    library.add("a", [("it", [1, 2, 3])])
    library.save(tmp_path)
    library.forget("a")
    library.add("a", [("it", [4, 5, 6])])
    library.save(tmp_path)
    assert contents(load(tmp_path, embedder)) == {"a": {"it": [4, 5, 6]}}


def test_what_is_forgotten_is_gone_from_the_disk(library: DocumentLibrary, tmp_path: Path) -> None:
    text = np.arange(100, 120, dtype=np.int32)
    library.add("a", [("secret name", text)])
    library.save(tmp_path)
    library.forget("a")
    library.save(tmp_path)
    for path in tmp_path.iterdir():
        assert text.tobytes() not in path.read_bytes()
        assert b"secret name" not in path.read_bytes()


def test_a_scope_is_forgotten_where_nobody_has_the_library_open(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path
) -> None:
    forget_scope(tmp_path, "a")
    text = np.arange(100, 120, dtype=np.int32)
    library.add("a", [("secret name", text)])
    library.save(tmp_path)
    forget_scope(tmp_path, "a")
    forget_scope(tmp_path, "nobody")
    for path in tmp_path.iterdir():
        assert text.tobytes() not in path.read_bytes()
        assert b"secret name" not in path.read_bytes()
    loaded = load(tmp_path, embedder)
    assert contents(loaded) == {tenant: kept for tenant, kept in contents(library).items() if tenant != "a"}


def test_an_empty_library_is_saved_and_loaded(embedder: TableEmbedder, tmp_path: Path) -> None:
    library = fresh(embedder)
    library.add("a", [("it", [1])])
    library.remove("a", "it")
    library.save(tmp_path)
    assert contents(load(tmp_path, embedder)) == {}


def test_nothing_there_is_said(embedder: TableEmbedder, tmp_path: Path) -> None:
    with pytest.raises(NoLibrary, match="holds no saved library"):
        load(tmp_path, embedder)


def check_damage(path: Path, library: DocumentLibrary, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that a damaged manifest is refused, and that any other damaged file costs one scope, by name."""
    if path.name == MANIFEST:
        with pytest.raises((LibraryDamaged, LibraryMismatch, NoLibrary)) as refused:
            load(path.parent, library.embedder)
        assert str(path.parent) in str(refused.value)
        return
    caplog.clear()
    kept, whole = contents(load(path.parent, library.embedder)), contents(library)
    assert len(kept) == len(whole) - 1
    assert kept == {tenant: whole[tenant] for tenant in kept}
    assert path.name in caplog.text


def test_a_file_that_is_cut_short_or_missing_costs_its_scope_alone(
    library: DocumentLibrary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.save(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            check_damage(path, library, caplog)
        path.unlink()
        check_damage(path, library, caplog)
        path.write_bytes(whole)
    assert contents(load(tmp_path, library.embedder)) == contents(library)


def test_a_flipped_bit_anywhere_costs_its_scope_alone(
    library: DocumentLibrary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library.save(tmp_path)
    drawn = np.random.default_rng(9)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for _ in range(12):
            flipped = bytearray(whole)
            flipped[drawn.integers(len(whole))] ^= 1 << int(drawn.integers(8))
            path.write_bytes(flipped)
            check_damage(path, library, caplog)
        path.write_bytes(whole)


def test_a_scope_that_is_left_out_stays_on_the_disk_until_it_is_forgotten(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path
) -> None:
    library.save(tmp_path)
    path = tmp_path / "1-1.ids"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    loaded = load(tmp_path, embedder)
    for change in (lambda: loaded.add("a", [("new", [1])]), lambda: loaded.remove("a", "4")):
        with pytest.raises(LibraryDamaged, match=r"1-1\.ids: has \d+ bytes of \d+; restore it"):
            change()
    loaded.add("b", [("new", [1, 2, 3])])
    loaded.save(tmp_path)
    path.write_bytes(whole)
    restored = load(tmp_path, embedder)
    assert contents(restored) == contents(library) | contents(loaded)
    path.write_bytes(whole[:-1])
    loaded = load(tmp_path, embedder)
    assert loaded.forget("a") == 0
    loaded.save(tmp_path)
    assert not path.exists()
    loaded.add("a", [("new", [1])])
    assert contents(loaded)["a"] == {"new": [1]}


class Stopping(SteppingDisk):
    """A disk that fails before the n-th change, as if the program ended; a write is half done."""

    def __init__(self, changes: int) -> None:
        self.left = changes

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        if self.left == 0:
            Disk().write(file, bytes(data)[: len(data) // 2])
        super().write(file, data)


def test_stopped_at_any_change_the_old_or_the_new_is_there(embedder: TableEmbedder, tmp_path: Path) -> None:
    seen = []
    for changes in range(200):
        folder = tmp_path / f"{changes}"
        library = fresh(embedder)
        library.add("a", [("one", [1, 2, 3])])
        library.add("b", [("two", [4, 5, 6])])
        library.save(folder)
        old = contents(library)
        library.add("a", [("three", [7, 8, 9])])
        library.forget("b")
        new = contents(library)
        disk = Stopping(changes)
        try:
            library.save(folder, disk)
            ended = True
        except KeyboardInterrupt:
            ended = False
        loaded = load(folder, embedder)
        assert contents(loaded) in (old, new)
        seen.append(contents(loaded) == new)
        # Whatever was left behind, the next save is whole and tidies up.
        loaded.add("c", [("four", [1])])
        loaded.save(folder)
        named = {path.name.partition(".")[0] for path in folder.iterdir()} - {"manifest"}
        _, _, scope_indexes = read_manifest(folder)
        assert named == {stem for scope_index in scope_indexes for stem in scope_index.stems}
        if ended:
            break
    assert ended
    assert seen == sorted(seen)
    assert seen[0] is False
    assert len(seen) > 10


def test_another_embedder_is_refused_naming_both(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path, table_folder: Path
) -> None:
    library.save(tmp_path)
    other = TableEmbedder.read(table_folder, 16)
    with pytest.raises(LibraryMismatch, match=rf"{embedder.digest[:12]}.*{other.digest[:12]}"):
        load(tmp_path, other)


def test_another_tokenizer_is_refused_naming_both(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path
) -> None:
    library.save(tmp_path)
    with pytest.raises(LibraryMismatch, match="with tokenizer tokens, asked for with others"):
        DocumentLibrary.load(tmp_path, embedder, "others", chunking=CHUNKING)


def test_other_chunks_are_refused(library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path) -> None:
    library.save(tmp_path)
    with pytest.raises(LibraryMismatch, match="chunks of 8/4, asked for with 64/32"):
        DocumentLibrary.load(tmp_path, embedder, "tokens")


def test_another_version_is_refused(
    library: DocumentLibrary, embedder: TableEmbedder, tmp_path: Path
) -> None:
    library.save(tmp_path)
    manifest = tmp_path / "manifest"
    manifest.write_bytes(manifest.read_bytes().replace(b"outrider-dense 2 ", b"outrider-dense 9 ", 1))
    with pytest.raises(LibraryMismatch, match="version 9, but this program reads version 2"):
        load(tmp_path, embedder)
