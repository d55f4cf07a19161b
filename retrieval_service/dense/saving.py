"""Saving a library, each scope by itself: nobody waits while another tenant's index is built or written.

One manifest names the files of all scopes. It is replaced in moments, once the files of a scope are written.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrieval_service.corpus.disk import Disk
from retrieval_service.dense.errors import DenseError
from retrieval_service.dense.manifest import (
    Maker,
    StoredScope,
    read_manifest,
    remove_unnamed,
    write_manifest,
)
from retrieval_service.dense.scope_index import ScopeIndex, Snapshot
from retrieval_service.dense.storage import Before, write_scope


@dataclass(frozen=True, slots=True)
class SavedScope:
    """A scope's index at one state, counted in changes, and the files that hold that state."""

    scope_index: ScopeIndex
    changes: int
    files: Before


@dataclass(frozen=True, slots=True)
class PresentScopes:
    """What a library has at one moment: its scopes' indexes, and the files of scopes that are left out."""

    scope_indexes: dict[str, ScopeIndex]
    left_out: list[StoredScope]


@dataclass(frozen=True, slots=True)
class _Write:
    """Files of one scope that are being written, all of one stem."""

    tenant: str
    scope_index: ScopeIndex
    stem: str


class Saving:
    """The files of a library, and which state of each scope they hold. Safe from several threads.

    Args:
        present: returns what the library has now.
    """

    def __init__(self, maker: Maker, present: Callable[[], PresentScopes]) -> None:
        self._maker = maker
        self._present = present
        self._committing = threading.Lock()
        """Held while the manifest is replaced, and while what it has to name changes."""
        self._writes: set[_Write] = set()
        self._written = threading.Condition()
        """Guards `_writes`; told when one of them ends."""
        self._saved: dict[str, SavedScope] = {}
        self._named: list[StoredScope] | None = None
        """What the manifest names; None: unknown."""
        self._folder: Path | None = None
        self._loaded_from: Path | None = None
        self._generation = 0

    def loaded(self, folder: Path, generation: int, saved: dict[str, SavedScope]) -> None:
        """Takes on the folder that the library was loaded from."""
        self._folder = self._loaded_from = folder
        self._generation, self._saved = generation, saved

    def save(self, folder: Path, disk: Disk, tenants: Iterable[str] | None) -> None:
        """Saves the changes of these tenants, or of all, since the last save. Raises OSError."""
        with self._committing:
            self._turn_to(folder)
            self._generation += 1
            generation = self._generation
        present = self._present().scope_indexes
        for number, tenant in enumerate(present if tenants is None else tenants):
            scope_index = present.get(tenant)
            self._wait_for_forgotten(tenant)
            if scope_index is not None and not self._is_saved(tenant, scope_index, scope_index.changes):
                self._save_scope(disk, folder, f"{generation}-{number}", tenant, scope_index)
        self._commit(disk, folder, None)

    def _turn_to(self, folder: Path) -> None:
        """Begins anew where the last save was to another folder."""
        if self._folder != folder:
            self._folder, self._saved, self._named = folder, {}, None
            self._generation = max(self._generation, _generation_in(folder))

    def _save_scope(self, disk: Disk, folder: Path, stem: str, tenant: str, scope_index: ScopeIndex) -> None:
        """Writes the scope's present state; additions to the scope wait.

        Rebuilding its index first may take minutes. Other scopes do not wait meanwhile.
        """
        write = _Write(tenant, scope_index, stem)

        def use(now: Snapshot) -> None:
            # Under `_committing`: a removal of files that is running has already read which stems to spare.
            with self._committing, self._written:
                self._writes.add(write)
            try:
                # Another call may have saved or forgotten it meanwhile.
                is_present = self._present().scope_indexes.get(tenant) is scope_index
                if is_present and not self._is_saved(tenant, scope_index, now.changes):
                    self._write(disk, folder, write, now)
            finally:
                with self._written:
                    self._writes.discard(write)
                    self._written.notify_all()

        scope_index.with_snapshot(use)

    def _write(self, disk: Disk, folder: Path, write: _Write, now: Snapshot) -> None:
        last = self._saved.get(write.tenant)
        before = last.files if last is not None and last.scope_index is write.scope_index else None
        try:
            stored = write_scope(disk, folder, write.stem, write.tenant, now, before)
            documents = tuple(entry.document for entry in now.entries)
            saved = SavedScope(write.scope_index, now.changes, Before(stored, documents))
            self._commit(disk, folder, write, saved)
        except OSError:
            self._make_room(disk, folder, write)
            raise

    def _commit(
        self, disk: Disk, folder: Path, write: _Write | None, saved: SavedScope | None = None
    ) -> None:
        """Writes a manifest of all saved scopes and of `saved`, which `write` made; removes other files."""
        with self._committing:
            present = self._present()
            known = dict(self._saved)
            if write is not None and saved is not None:
                known[write.tenant] = saved
            # Leaves out scopes that were forgotten meanwhile. `save` waits for their writes to end before it
            # writes a new scope of the same tenant.
            known = {
                tenant: one
                for tenant, one in known.items()
                if present.scope_indexes.get(tenant) is one.scope_index
            }
            named = [*self._left_out(present), *(one.files.stored for one in known.values())]
            if named != self._named:
                self._named = None
                write_manifest(disk, folder, self._maker, self._generation, named)
            self._saved, self._named = known, named
            remove_unnamed(disk, folder, named, self._spared(write))

    def _make_room(self, disk: Disk, folder: Path, write: _Write) -> None:
        """Inside an `except`: removes what was written of a save that failed, since the disk may be full."""
        with self._committing, suppress(OSError, DenseError):
            # The new manifest may be there though an error followed.
            _, _, named = read_manifest(folder)
            saved = [one.files.stored for one in self._saved.values()]
            named = [*named, *saved, *self._left_out(self._present())]
            remove_unnamed(disk, folder, named, self._spared(write))

    def _left_out(self, present: PresentScopes) -> list[StoredScope]:
        return present.left_out if self._folder == self._loaded_from else []

    def _spared(self, own: _Write | None) -> frozenset[str]:
        """Stems of the files that other calls write now."""
        with self._written:
            return frozenset(write.stem for write in self._writes if write is not own)

    def _is_saved(self, tenant: str, scope_index: ScopeIndex, changes: int) -> bool:
        saved = self._saved.get(tenant)
        return saved is not None and saved.scope_index is scope_index and saved.changes == changes

    def _wait_for_forgotten(self, tenant: str) -> None:
        """Waits until no call still writes a forgotten scope of this tenant, so that its files go, too."""

        def is_over() -> bool:
            present = self._present().scope_indexes.get(tenant)
            return all(one.tenant != tenant or one.scope_index is present for one in self._writes)

        with self._written:
            self._written.wait_for(is_over)


def _generation_in(folder: Path) -> int:
    """The highest generation of any file in the folder, so that no file is overwritten."""
    stems = (path.name.partition("-")[0] for path in folder.iterdir())
    return max((int(stem) for stem in stems if stem.isdigit()), default=0)
