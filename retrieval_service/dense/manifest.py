"""The manifest of a library of documents: which files count, by scope.

Knows nothing of vectors, so that a worker without an index can forget a scope.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval_service.corpus.disk import Disk
from retrieval_service.dense.errors import LibraryDamaged, LibraryMismatch, NoLibrary

VERSION = 2
MANIFEST = "manifest"
_MAGIC = "outrider-dense"
_ENDINGS = (".names", ".ids", ".vectors", ".index")


@dataclass(frozen=True, slots=True)
class Maker:
    """Embedder and tokenizer of a library, which is read only under the same digests; names inform people."""

    embedder: str
    embedder_digest: str
    tokenizer_digest: str
    dimensions: int
    window: int
    stride: int


@dataclass(frozen=True, slots=True)
class StoredScope:
    """One scope's files by name with size and SHA-256, and the kind of its index."""

    tenant: str
    kind: str
    files: Mapping[str, tuple[int, str]]

    @property
    def stems(self) -> tuple[str, ...]:
        """Names of the scope's files without their endings, in order."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.files))


def write_manifest(
    disk: Disk, folder: Path, maker: Maker, generation: int, scope_indexes: list[StoredScope]
) -> None:
    """Makes these scopes the library, by replacing its manifest. Raises OSError."""
    disk.sync_folder(folder)
    body = json.dumps(
        {
            "generation": generation,
            "maker": asdict(maker),
            "shelves": [asdict(scope_index) for scope_index in scope_indexes],
        }
    )
    disk.put(
        folder / MANIFEST, f"{_MAGIC} {VERSION} {hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode()
    )


def remove_unnamed(
    disk: Disk, folder: Path, scope_indexes: list[StoredScope], spared: Collection[str] = ()
) -> None:
    """Removes files that none of these scopes names; `spared` are stems that stay. Raises OSError."""
    named = {name for scope_index in scope_indexes for name in scope_index.files}
    for path in folder.iterdir():
        if path.suffix in _ENDINGS and path.name not in named and path.stem not in spared:
            disk.remove(path)


def read_manifest(folder: Path) -> tuple[Maker, int, list[StoredScope]]:
    """The manifest in a folder. Raises NoLibrary, LibraryDamaged, or LibraryMismatch for another version."""
    path = folder / MANIFEST
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError as error:
        raise NoLibrary(f"{folder}: holds no saved library") from error
    parts = head.decode(errors="replace").split(" ")
    if len(parts) != 3 or parts[0] != _MAGIC:
        raise LibraryDamaged(f"{path}: is no manifest of a library; restore it or add the documents again")
    if parts[1] != str(VERSION):
        raise LibraryMismatch(
            f"{path}: has version {parts[1]}, but this program reads version {VERSION}; make the library "
            "again"
        )
    if hashlib.sha256(body).hexdigest() != parts[2]:
        raise LibraryDamaged(f"{path}: does not match its checksum; restore it or add the documents again")
    read: dict[str, Any] = json.loads(body)
    scope_indexes = [
        StoredScope(one["tenant"], one["kind"], {name: tuple(entry) for name, entry in one["files"].items()})
        for one in read["shelves"]
    ]
    return Maker(**read["maker"]), read["generation"], scope_indexes


def check_maker(folder: Path, saved: Maker, own: Maker) -> None:
    """Checks that a library's maker is this one. Raises LibraryMismatch, which names both sides."""
    if saved.embedder_digest != own.embedder_digest:
        both = f"with {_named(saved)}, asked for with {_named(own)}"
        raise LibraryMismatch(f"{folder}: made {both}; use that embedder or add the documents again")
    if saved.tokenizer_digest != own.tokenizer_digest:
        both = f"with tokenizer {saved.tokenizer_digest[:12]}, asked for with {own.tokenizer_digest[:12]}"
        raise LibraryMismatch(f"{folder}: made {both}; use that tokenizer or add the documents again")
    if saved != own:
        why = f"chunks of {saved.window}/{saved.stride}, asked for with {own.window}/{own.stride}"
        raise LibraryMismatch(f"{folder}: made with {why}; use those or add the documents again")


def forget_scope(folder: Path, tenant: str) -> None:
    """Removes a scope from a library that nobody has open; does nothing where there is no library.

    Raises OSError, LibraryDamaged or LibraryMismatch.
    """
    try:
        maker, generation, scope_indexes = read_manifest(folder)
    except NoLibrary:
        return
    left = [scope_index for scope_index in scope_indexes if scope_index.tenant != tenant]
    disk = Disk()
    write_manifest(disk, folder, maker, generation, left)
    remove_unnamed(disk, folder, left)


def _named(maker: Maker) -> str:
    return f"{maker.embedder} ({maker.embedder_digest[:12]})"
