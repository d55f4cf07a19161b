"""Past outputs of all tenants: fed as ids are committed, looked up meanwhile, kept across restarts."""

import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.folder_lock import FolderLock
from retrieval_service.past.compiled_index import IndexLibrary
from retrieval_service.past.records import PastError
from retrieval_service.past.tenant import STEP, Tenant
from retrieval_service.past.tenant_files import TenantFiles, finish_wiping, is_folder_name, tenant_of
from retrieval_service.past.text import TOKEN_LIMIT_END, Added, PastText, checked
from retrieval_service.past.writer import DiskPolicy, Writer
from retrieval_service.trie import CountedTrie, Memory

_log = logging.getLogger(__name__)

NAME_BYTES = 1024
"""Most bytes of a tenant's or a session's name in UTF-8."""

_ROOM_EVERY = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the past outputs kept. A sequence counts as 64 tokens at least.

    Attributes:
        tenant_tokens: most tokens of one tenant; its oldest sequences go first.
        total_tokens: most tokens of all tenants; the one with the most gives up its oldest sequence. Checked
            every 128 ids.
        tenants: most tenants; nothing is kept of further ones.
    """

    tenant_tokens: int = 2_000_000
    total_tokens: int = 16_000_000
    tenants: int = 1_000

    def __post_init__(self) -> None:
        if not 0 < self.tenant_tokens < TOKEN_LIMIT_END:
            raise ValueError(f"tenant_tokens {self.tenant_tokens} is not within 1 .. {TOKEN_LIMIT_END - 1}")
        if self.total_tokens < 1 or self.tenants < 1:
            raise ValueError(
                f"total_tokens {self.total_tokens} and tenants {self.tenants} must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class Stats:
    """Present counts; `evicted_tokens`, `skipped_records` and `refused` count since the opening.

    `behind` tenants are not on the disk in full; `skipped_records` were left to a later snapshot; `refused`
    calls would have made one tenant too many.
    """

    tenants: int
    sequences: int
    tokens: int
    evicted_tokens: int
    waiting_records: int
    behind: int
    skipped_records: int
    refused: int


class PastOutputs:
    """All tenants' past outputs; safe from any thread.

    Nothing is shared between tenants: each has its own text, order and folder. `folder` None keeps nothing
    across restarts. One process at a time has a folder.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: Limits | None = None,
        policy: DiskPolicy | None = None,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        """Read the folder. Raises PastError, or FolderInUse, where it cannot be used; OSError otherwise."""
        self._limits = limits or Limits()
        self._folder = folder
        self._say = say
        self._tenants: dict[str, Tenant] = {}
        self._lock = threading.Lock()
        self._since_room = 0
        self._refused = 0
        self._library: IndexLibrary | None = None
        self._writer: Writer | None = None
        self._held: FolderLock | None = None
        if folder is not None:
            self._held = FolderLock(folder)
            try:
                self._open(folder)
            except BaseException:
                self._held.close()
                raise
            self._writer = Writer(policy or DiskPolicy(), say)
            for tenant in self._tenants.values():
                self._writer.start(tenant)
        self._make_room()

    def extend(self, tenant: str, session: str, ids: Sequence[int]) -> bool:
        """Add ids that a session committed; False for a new tenant beyond `limits.tenants`.

        Never waits for a disk. Raises ValueError for a name or an id that is none; then nothing is kept.
        """
        _check_name("session", session)
        whole = checked(ids)
        at = 0
        while at < len(whole):
            known = self._tenant(tenant)
            if known is None:
                return False
            if known.extend(session, whole[at : at + STEP], self._write):
                at += STEP
        self._since_room += len(whole)
        if self._since_room >= _ROOM_EVERY:
            self._make_room()
        return True

    def use(self, library: IndexLibrary) -> None:
        """Index all text with this library from now on; what is found stays the same. Raises MemoryError.

        Each tenant's lookups wait while its index is taken over: some tens of milliseconds a million ids.
        """
        self._library = library
        for tenant in list(self._tenants.values()):
            tenant.use(library)

    def finish(self, tenant: str, session: str) -> None:
        """End a session's sequence; later ids under its name begin a new one."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.finish(session)

    def memory(self, tenant: str) -> Memory:
        """A tenant's past outputs as a Memory; it finds later outputs too, and never another tenant's."""
        return _View(self._tenants, tenant)

    def outputs(self, tenant: str) -> list[tuple[str, "array[int]"]]:
        """Session and ids of each past output of a tenant, oldest first; empty for an unknown tenant."""
        known = self._tenants.get(tenant)
        return [] if known is None else known.outputs()

    def forget(self, tenant: str, *sessions: str, timeout: float = 60.0) -> int:
        """Remove sessions' text, from memory at once and from the disk, all together, before this returns.

        Stop feeding the sessions first: what comes afterwards is new text. The number of ids that were held.
        Raises OSError where files could not be removed, TimeoutError where they were not yet, and
        Unavailable after `close`.
        """
        # Not known here its files may be there all the same, damaged beyond reading whose they are.
        known = self._tenants.get(tenant) or self._new(tenant)
        count = known.forget(sessions)
        if self._writer is not None:
            self._writer.forget(known, sessions, timeout)
        return count

    def forget_tenant(self, tenant: str, *, timeout: float = 60.0) -> int:
        """Remove all of a tenant's text from memory and disk; raises like `forget`."""
        _check_name("tenant", tenant)
        with self._lock:
            known = self._tenants.pop(tenant, None) or self._new(tenant)
        count = known.leave()
        if self._writer is not None:
            self._writer.wipe(known, timeout)
        return count

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all ids added so far are durable; False where they cannot be written now."""
        return self._writer is None or self._writer.flush(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Write the waiting records, and release the folder.

        A disk that does not take them in time keeps the folder until the process ends.
        """
        if self._writer is not None and not self._writer.close(timeout):
            self._say(f"past outputs were not all written within {timeout:g} s")
            return
        if self._held is not None:
            self._held.close()
            self._held = None

    def stats(self) -> Stats:
        """Counts of the text held and of failures."""
        tenants = list(self._tenants.values())
        return Stats(
            tenants=len(tenants),
            sequences=sum(len(one.text) for one in tenants),
            tokens=sum(one.text.tokens for one in tenants),
            evicted_tokens=sum(one.text.evicted for one in tenants),
            waiting_records=0 if self._writer is None else self._writer.waiting(),
            behind=sum(one.behind for one in tenants),
            skipped_records=sum(one.skipped_records for one in tenants),
            refused=self._refused,
        )

    def _open(self, folder: Path) -> None:
        finish_wiping(folder)
        for path in sorted(folder.iterdir()):
            if not (path.is_dir() and is_folder_name(path.name)):
                continue
            name = tenant_of(path)
            if name is None:
                self._say(f"{path} holds nothing that can be read: left as it is")
                continue
            tenant = self._new(name)
            assert tenant.files is not None
            if tenant.files.folder != path:
                raise PastError(
                    f"{path} holds the outputs of tenant {name!r}, which belong elsewhere: it was copied "
                    "there; move it away"
                )
            replayed = tenant.files.open(self._limits.tenant_tokens)
            tenant.text.restore(replayed.listed(), replayed.next_serial)
            tenant.behind = not replayed.is_on_disk
            self._tenants[name] = tenant

    def _new(self, name: str) -> Tenant:
        files = None if self._folder is None else TenantFiles(self._folder, name, self._say)
        return Tenant(name, PastText(self._limits.tenant_tokens), files)

    def _tenant(self, name: str) -> Tenant | None:
        known = self._tenants.get(name)
        if known is not None:
            return known
        _check_name("tenant", name)
        with self._lock:
            known = self._tenants.get(name)
            if known is None:
                if len(self._tenants) >= self._limits.tenants:
                    self._refused += 1
                    return None
                known = self._tenants[name] = self._new(name)
                if self._library is not None:
                    known.use(self._library)
                if self._writer is not None:
                    self._writer.start(known)
        return known

    def _write(self, tenant: Tenant, added: Added) -> bool:
        return self._writer is not None and self._writer.write(tenant, added)

    def _make_room(self) -> None:
        self._since_room = 0
        tenants = list(self._tenants.values())
        while sum(one.text.cost for one in tenants) > self._limits.total_tokens:
            if not max(tenants, key=lambda one: one.text.cost).give_up_oldest():
                break
        for tenant in tenants:
            # More than came in, so that it does not pile up, but not all at once: the caller waits.
            tenant.settle(4 * _ROOM_EVERY)


@dataclass(frozen=True, slots=True)
class _View:
    tenants: dict[str, Tenant]
    name: str

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        tenant = self.tenants.get(self.name)
        return None if tenant is None else tenant.lookup(ids, node_limit=node_limit, depth=depth)


def _check_name(what: str, name: str) -> None:
    if not 0 < len(name.encode()) <= NAME_BYTES:
        raise ValueError(f"a {what}'s name has 1 to {NAME_BYTES} bytes, not {len(name.encode())}")
