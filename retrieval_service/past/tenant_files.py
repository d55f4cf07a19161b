"""One tenant's folder: a snapshot and the log of what came after, exchanged for newer ones at once.

Files are named by generation. A generation counts from the moment its snapshot has its name, which it gets
once it and the log beside it are whole and on the disk; older ones are then shredded. So there is at every
moment exactly one state that a reader finds, and what is torn can only be the end of the newest log.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from retrieval_service.past import disk
from retrieval_service.past.records import (
    INTENT,
    LOG,
    SNAPSHOT,
    DamagedError,
    Forget,
    PastError,
    PastFileHeader,
    pack_header,
    pack_record,
    unpack_header,
    unpack_records,
)
from retrieval_service.past.replay import Replayed, read_snapshot, replay_log, whole
from retrieval_service.past.text import Added, Held

_GENERATION = re.compile(r"(\d{10})\.(snapshot|log)(\.part)?")
_INTENT = "forget"
_LEAVING = ".forgotten"

Say = Callable[[str], None]


def folder_name(tenant: str) -> str:
    """A folder name for any tenant: the SHA-256 of the tenant's name, which the files hold too."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def is_folder_name(name: str) -> bool:
    """Whether a name can be that of a tenant's folder."""
    return re.fullmatch(r"[0-9a-f]{64}", name) is not None


class TenantFiles:
    """One tenant's files on disk; for one thread at a time. Every method may raise OSError.

    After OSError from `append` or `snapshot` what is on disk is some earlier state, and only a snapshot
    that succeeds brings it up to date again.
    """

    def __init__(self, root: Path, tenant: str, say: Say) -> None:
        self.tenant = tenant
        self.generation = 0
        self.log_bytes = 0
        self.snapshot_bytes = 0
        self._root = root
        self.folder = root / folder_name(tenant)
        self._say = say

    def open(self, token_limit: int) -> Replayed:
        """Read the files, up to `token_limit`, and leave them ready to append to, if the disk allows that.

        Raises PastError for files that are not this tenant's or of another version.
        """
        if not self.folder.is_dir():
            return Replayed()
        self._refuse_strangers()
        self.generation = max(
            (number for number, path in self._numbered() if path.suffix == ".snapshot"), default=0
        )
        replayed, sound = self._read()
        # First: an evicted sequence must not come back for the room that a forgotten one makes.
        replayed.fit(token_limit)
        leaving = self._intended()
        if leaving:
            replayed.forget(leaving)
            self._say(f"past outputs of {self.tenant!r}: finished forgetting a session")
        replayed.is_on_disk = self.generation > 0
        if leaving:
            replayed.is_on_disk = self._replace(replayed.listed(), replayed.next_serial)
        elif not sound:
            replayed.is_on_disk = self._renew(replayed.listed(), replayed.next_serial)
        self._remove_older()
        return replayed

    def append(self, records: Iterable[Added]) -> None:
        """Append records to the log; the next `sync` makes them durable."""
        data = b"".join(pack_record(record, self.generation) for record in records)
        disk.append(self._log(), data, self.log_bytes)
        self.log_bytes += len(data)

    def sync(self) -> None:
        """Make the appended records durable."""
        if self.generation:
            disk.sync_file(self._log())

    def snapshot(self, sequences: Sequence[Held], next_serial: int) -> None:
        """Begin a generation with these sequences and an empty log, and shred the one before."""
        new = self.generation + 1
        self.folder.mkdir(mode=0o700, exist_ok=True)
        snapshot, log = self._path(new, "snapshot"), self._path(new, "log")
        part = snapshot.with_suffix(".snapshot.part")
        try:
            records = (pack_record(record, new) for record in whole(sequences))
            header = PastFileHeader(SNAPSHOT, new, next_serial, self.tenant)
            snapshot_bytes = disk.write_new(part, (pack_header(header), *records))
            log_bytes = disk.write_new(log, [pack_header(PastFileHeader(LOG, new, next_serial, self.tenant))])
            part.rename(snapshot)
        except OSError:
            for path in (part, log):
                with suppress(OSError):
                    disk.shred(path)
            raise
        self.generation, self.snapshot_bytes, self.log_bytes = new, snapshot_bytes, log_bytes
        disk.sync_folder(self.folder)
        disk.sync_folder(self._root)
        self._remove_older()

    def forget(self, sessions: Sequence[str], sequences: Sequence[Held], next_serial: int) -> bool:
        """Continue with `sequences`, which lack the sessions' text, and shred all files that may hold it.

        False where the tenant has no files afterwards: it had none, or the disk has no room for `sequences`.
        """
        if not self.folder.is_dir():
            return False
        with suppress(OSError):
            self._intend(sessions)
        return self._replace(sequences, next_serial)

    def wipe(self) -> None:
        """Remove the tenant's folder; if the process dies meanwhile, `finish_wiping` continues."""
        leaving = self._root / (self.folder.name + _LEAVING)
        if self.folder.is_dir():
            _wipe_folder(leaving)
            self.folder.rename(leaving)
            disk.sync_folder(self._root)
        _wipe_folder(leaving)
        disk.sync_folder(self._root)
        self.generation = self.log_bytes = self.snapshot_bytes = 0

    def _replace(self, sequences: Sequence[Held], next_serial: int) -> bool:
        """Replace the old generation by a new one; by none, and False, where the disk has no room for any."""
        fits = self._renew(sequences, next_serial)
        if not fits:
            self.generation += 1
            self._remove_older()
        return fits

    def _renew(self, sequences: Sequence[Held], next_serial: int) -> bool:
        """Begin a generation; False, with the old one left as it is, where the disk has no room for it."""
        try:
            self.snapshot(sequences, next_serial)
        except OSError as error:
            self._say(f"past outputs of {self.tenant!r} are in memory only for now: {error}")
            return False
        return True

    def _read(self) -> tuple[Replayed, bool]:
        """Sequences of the newest generation, and whether its files can be continued as they are."""
        if not self.generation:
            return Replayed(), True
        snapshot, log = self._path(self.generation, "snapshot"), self._log()
        data = snapshot.read_bytes()
        self.snapshot_bytes = len(data)
        try:
            replayed, sound = read_snapshot(data, snapshot)
        except DamagedError:
            replayed, sound = Replayed(), False
        if not sound:
            self._say(
                f"{snapshot} is damaged: kept the {len(replayed.sequences)} sequences before the damage"
            )
            return replayed, False
        try:
            data = log.read_bytes()
            end = replay_log(replayed, data, log)
        except (DamagedError, FileNotFoundError) as error:
            self._say(f"{log} is damaged ({error}): kept what its snapshot holds")
            return replayed, False
        if end < len(data):
            self._say(f"{log} is torn: cut its last {len(data) - end} bytes, kept the {end} before")
            disk.truncate(log, end)
        self.log_bytes = end
        return replayed, True

    def _refuse_strangers(self) -> None:
        for path in (*(path for _, path in self._numbered()), self.folder / _INTENT):
            with suppress(DamagedError, FileNotFoundError):
                header, _ = unpack_header(disk.beginning(path), path)
                if header.tenant != self.tenant:
                    raise PastError(
                        f"{path} is of tenant {header.tenant!r} but lies where {self.tenant!r}'s files do: "
                        "it was copied there; move it away"
                    )

    def _intend(self, sessions: Sequence[str]) -> None:
        part, path = self.folder / f"{_INTENT}.part", self.folder / _INTENT
        header = pack_header(PastFileHeader(INTENT, self.generation, 0, self.tenant))
        records = (pack_record(Forget(session), self.generation) for session in sessions)
        disk.write_new(part, [header, *records])
        part.rename(path)
        disk.sync_folder(self.folder)

    def _intended(self) -> frozenset[str]:
        with suppress(FileNotFoundError, DamagedError):
            path = self.folder / _INTENT
            data = path.read_bytes()
            header, at = unpack_header(data, path)
            records = unpack_records(data, at, header.generation)
            return frozenset(record.session for record, _ in records if isinstance(record, Forget))
        return frozenset()

    def _numbered(self) -> list[tuple[int, Path]]:
        found = ((_GENERATION.fullmatch(path.name), path) for path in sorted(self.folder.iterdir()))
        return [(int(match[1]), path) for match, path in found if match]

    def _remove_older(self) -> None:
        """Shred every file but the newest generation's; an intent goes last, since it holds until then."""
        current = {self._path(self.generation, "snapshot"), self._log()}
        old = [path for _, path in self._numbered() if path not in current]
        for path in (*old, self.folder / f"{_INTENT}.part", self.folder / _INTENT):
            disk.shred(path)
        disk.sync_folder(self.folder)

    def _path(self, generation: int, kind: str) -> Path:
        return self.folder / f"{generation:010d}.{kind}"

    def _log(self) -> Path:
        return self._path(self.generation, "log")


def tenant_of(folder: Path) -> str | None:
    """The tenant that a folder's files name; None if no file can be read. Raises PastError, OSError."""
    for path in sorted(folder.iterdir()):
        if _GENERATION.fullmatch(path.name):
            with suppress(DamagedError):
                return unpack_header(disk.beginning(path), path)[0].tenant
    return None


def finish_wiping(root: Path) -> None:
    """Finish removing the folders that a process which died was removing."""
    for path in sorted(root.glob(f"*{_LEAVING}")):
        _wipe_folder(path)
        disk.sync_folder(root)


def _wipe_folder(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            disk.shred(path)
        folder.rmdir()
