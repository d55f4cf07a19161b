"""A library as files: what was saved last, whole, or nothing; never a mixture.

Each save writes new files, then replaces the manifest that names them at once, then removes what it no longer
names. So a crash at any point leaves the old state or the new one. The manifest carries its own checksum and
those of all files. Of each scope: `.names` (JSON), `.ids` (int32), `.vectors` (float16), `.index` (FAISS; an
exact index is built again instead). A scope to which documents were only added gets more of the first three,
under another stem, until there are too many; in the order of the manifest they are one. `manifest.py` has the
manifest.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_service.corpus.disk import Disk
from retrieval_service.dense.errors import LibraryDamaged
from retrieval_service.dense.index import VectorIndex
from retrieval_service.dense.manifest import Maker, StoredScope
from retrieval_service.dense.matching import Ids
from retrieval_service.dense.scope_index import Document, IndexedDocument, Snapshot

MOST_STEMS = 64
"""Of one scope; then it is written as a whole."""


@dataclass(frozen=True, slots=True)
class Before:
    """The documents that a scope's files hold, in order."""

    stored: StoredScope
    documents: tuple[Document, ...]

    def lacks(self, snapshot: Snapshot) -> tuple[IndexedDocument, ...] | None:
        """Documents added since the last save; None if only a full save will do.

        A full save is needed after other changes, and once there are too many files.
        """
        known, entries = len(self.documents), snapshot.entries
        grown = len(entries) > known and all(
            entry.document is document for entry, document in zip(entries, self.documents, strict=False)
        )
        exact = snapshot.index.kind == self.stored.kind == "flat"
        return entries[known:] if grown and exact and len(self.stored.stems) < MOST_STEMS else None


def write_scope(
    disk: Disk, folder: Path, stem: str, tenant: str, snapshot: Snapshot, before: Before | None = None
) -> StoredScope:
    """Writes a scope's new documents, or all of them, to files that the manifest does not name yet.

    The scope changes on disk only when a manifest names the files.
    """
    lacking = None if before is None else before.lacks(snapshot)
    files = {} if before is None or lacking is None else dict(before.stored.files)
    files |= _write_entries(disk, folder, stem, snapshot.entries if lacking is None else lacking)
    if snapshot.index.kind != "flat":
        path = folder / f"{stem}.index"
        snapshot.index.write(path)
        with path.open("rb") as written:
            disk.sync(written)
        files[path.name] = (path.stat().st_size, _sha256(path))
    return StoredScope(tenant, snapshot.index.kind, files)


def _write_entries(
    disk: Disk, folder: Path, stem: str, entries: Sequence[IndexedDocument]
) -> dict[str, tuple[int, str]]:
    names = [[entry.document.name, len(entry.document.ids), len(entry.vectors)] for entry in entries]
    files = {}
    for ending, blocks in (
        (".names", [json.dumps(names).encode()]),
        (".ids", [entry.document.ids.tobytes() for entry in entries]),
        (".vectors", [entry.vectors.tobytes() for entry in entries]),
    ):
        digest, size = hashlib.sha256(), 0
        with disk.create(folder / f"{stem}{ending}") as file:
            for block in blocks:
                disk.write(file, block)
                digest.update(block)
                size += len(block)
            disk.sync(file)
        files[f"{stem}{ending}"] = (size, digest.hexdigest())
    return files


def read_scope(folder: Path, scope_index: StoredScope, maker: Maker) -> Snapshot:
    """Maps the files of a scope, or reads those of several stems. Raises LibraryDamaged with a file's name.

    A mapping keeps its file open. So a scope keeps two files open at most, however often it was added to.
    """
    for name, (size, checksum) in scope_index.files.items():
        if state := _damage(folder / name, size, checksum):
            raise LibraryDamaged(
                f"{folder / name}: {state}; restore it and start again, or remove all documents of its owner"
            )
    entries: list[IndexedDocument] = []
    vectors: list[Any] = []
    array_of = _mapped if len(scope_index.stems) == 1 else _read
    for stem in scope_index.stems:
        ids = array_of(folder / f"{stem}.ids", np.dtype("<i4"))
        own = array_of(folder / f"{stem}.vectors", np.dtype("<f2")).reshape(-1, maker.dimensions)
        names = json.loads((folder / f"{stem}.names").read_bytes())
        entries += _entries(names, ids, own, first=sum(map(len, vectors)))
        vectors.append(own)
    if scope_index.kind != "flat":
        return Snapshot(
            tuple(entries),
            VectorIndex.read(folder / f"{scope_index.stems[-1]}.index", _kind(scope_index.kind)),
        )
    return Snapshot(tuple(entries), VectorIndex.build(np.concatenate(vectors), "flat"))


def _entries(
    names: list[tuple[str, int, int]], ids: Ids, vectors: Any, first: int
) -> Iterator[IndexedDocument]:
    at = row = 0
    for name, length, chunks in names:
        document = Document(name, ids[at : at + length])
        yield IndexedDocument(document, vectors[row : row + chunks], first + row)
        at, row = at + length, row + chunks


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The file as an array [values]; an empty file cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)


def _read(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A copy of the file in memory as an array [values], which nobody can write to."""
    return np.frombuffer(path.read_bytes(), dtype=dtype)


def _kind(text: str) -> Any:
    return text


def _damage(path: Path, size: int, checksum: str) -> str:
    """How a file differs from what was written; empty for the same bytes."""
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes of {size}"
        return "" if _sha256(path) == checksum else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
