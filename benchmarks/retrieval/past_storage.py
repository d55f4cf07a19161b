"""Past outputs' own files beside `sqlite3`: what writing, reading, forgetting and damage cost with each.

Run `python -m benchmarks.retrieval.past_storage [--tokens N]`. Both get the same records of four ids (sixteen
sequences side by side), in batches of 1,000 as the writer makes them, and are synced ten times. Both run
in this process, in turns, so ratios stand on a busy machine too. The last line is one JSON object.

`SqliteFiles` is what would stand in place of `TenantFiles`: a database for each tenant, a write-ahead log,
`secure_delete`, one transaction a batch, a connection that stays open. The row `many tenants` also opens it
for each batch: the databases of a thousand tenants are three thousand open files.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from benchmarks.retrieval.past_cost import PIECE, SESSIONS, template_traffic
from benchmarks.shared.envelope import REPOSITORY, module_command
from retrieval_service.past import disk
from retrieval_service.past.tenant_files import TenantFiles
from retrieval_service.past.text import Added, Held

BATCH = 1_000
SYNCS = 10
TENANTS, ROUNDS = 200, 5
FLIPS = 200
KILLS = 5
LIMIT = 2**27


class Storage(Protocol):
    """What is measured of a tenant's storage."""

    def append(self, records: Sequence[Added]) -> None: ...
    def sync(self) -> None: ...


class SqliteFiles:
    """One tenant's past outputs in a database; for one thread at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "past.sqlite"
        self._wal = Path(f"{self.path}-wal")
        self._database = self._opened()

    def _opened(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("PRAGMA secure_delete=ON")
        database.execute("CREATE TABLE IF NOT EXISTS sequence (serial INTEGER PRIMARY KEY, session TEXT)")
        database.execute(
            "CREATE TABLE IF NOT EXISTS piece (serial INTEGER, start INTEGER, ids BLOB,"
            " PRIMARY KEY (serial, start)) WITHOUT ROWID"
        )
        return database

    def append(self, records: Sequence[Added]) -> None:
        """Writes a batch in one transaction."""
        database = self._database
        with self._transaction():
            database.executemany(
                "INSERT OR IGNORE INTO sequence VALUES (?, ?)",
                [(one.serial, one.session) for one in records if not one.start],
            )
            database.executemany(
                "INSERT OR IGNORE INTO piece VALUES (?, ?, ?)",
                [(one.serial, one.start, one.ids.tobytes()) for one in records],
            )

    def sync(self) -> None:
        """Makes what was written durable."""
        with suppress(FileNotFoundError):
            disk.sync_file(self._wal)

    def sequences(self) -> list[Held]:
        """All sequences, oldest first."""
        found: dict[int, array[int]] = {}
        for serial, ids in self._database.execute("SELECT serial, ids FROM piece ORDER BY serial, start"):
            found.setdefault(serial, array("I")).frombytes(ids)
        named = self._database.execute("SELECT serial, session FROM sequence ORDER BY serial")
        return [(serial, session, found[serial]) for serial, session in named if serial in found]

    def forget(self, sessions: Sequence[str]) -> None:
        """Removes sessions; what the log held of them is overwritten, as the database's own pages are."""
        with self._transaction():
            for session in sessions:
                self._database.execute(
                    "DELETE FROM piece WHERE serial IN (SELECT serial FROM sequence WHERE session = ?)",
                    (session,),
                )
                self._database.execute("DELETE FROM sequence WHERE session = ?", (session,))
        # The last connection that closes moves the log into the database and unlinks it, unoverwritten.
        kept = self.path.with_suffix(".leaving")
        with suppress(FileNotFoundError):
            os.link(self._wal, kept)
        self._database.close()
        disk.shred(kept)
        self._database = self._opened()

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._database)


class _Transaction:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")


def records(tokens: int) -> Iterator[Added]:
    """Records as sixteen growing sessions make them, of at least `tokens` ids."""
    traffic = template_traffic(1)
    serial = made = 0
    while made < tokens:
        outputs = list(islice(traffic, SESSIONS))
        for at in range(0, max(map(len, outputs)), PIECE):
            for number, output in enumerate(outputs):
                if at < len(output):
                    ids = array("I", output[at : at + PIECE])
                    made += len(ids)
                    yield Added(serial + number, f"session {serial + number}", at, ids)
        serial += SESSIONS


def batches(tokens: int) -> list[list[Added]]:
    """The records in the batches in which they are written."""
    whole = list(records(tokens))
    return [whole[at : at + BATCH] for at in range(0, len(whole), BATCH)]


def own_files(folder: Path, tenant: str = "tenant") -> TenantFiles:
    """The tenant's own files, ready to be appended to."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TenantFiles(folder, tenant, lambda _: None)
    if not files.open(LIMIT).sequences:
        files.snapshot([], 0)
    return files


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds and processor seconds of some work."""
    began, worked = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - worked


def write(storage: Storage, made: Sequence[Sequence[Added]]) -> None:
    """Writes batches, and syncs SYNCS times on the way."""
    every = max(1, len(made) // SYNCS)
    for number, batch in enumerate(made, 1):
        storage.append(batch)
        if number % every == 0:
            storage.sync()


def bytes_below(folder: Path) -> bytes:
    """All bytes of all files below a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def write_row(made: Sequence[Sequence[Added]], tokens: int, folder: Path) -> dict[str, Any]:
    """Ids written a second and a processor second, bytes on the disk, and seconds to read and to forget."""
    files, database = own_files(folder / "own"), SqliteFiles(folder / "sqlite")
    own_took, own_worked = timed(lambda: write(files, made))
    their_took, their_worked = timed(lambda: write(database, made))
    own_bytes, their_bytes = len(bytes_below(folder / "own")), len(bytes_below(folder / "sqlite"))
    again = TenantFiles(folder / "own", "tenant", lambda _: None)
    read = again.open(LIMIT).listed()
    own_read, _ = timed(lambda: TenantFiles(folder / "own", "tenant", lambda _: None).open(LIMIT).listed())
    their_read, _ = timed(database.sequences)
    assert database.sequences() == read
    gone = read[len(read) // 2]
    left = [one for one in read if one is not gone]
    own_forgot, _ = timed(lambda: again.forget([gone[1]], left, gone[0] + len(read)))
    their_forgot, _ = timed(lambda: database.forget([gone[1]]))
    # Records of the forgotten session that no other session has, too.
    others = b"".join(one[2].tobytes() for one in left)
    text = gone[2].tobytes()
    pieces = [text[at : at + 4 * PIECE] for at in range(0, len(text) - 4 * PIECE, 4 * PIECE)]
    pieces = [piece for piece in pieces if piece not in others]
    found = {name: bytes_below(folder / name) for name in ("own", "sqlite")}
    remains = {name: sum(piece in whole for piece in pieces) for name, whole in found.items()}
    database.close()
    return {
        "ids_per_second": [round(tokens / own_took), round(tokens / their_took)],
        "ids_per_cpu_second": [round(tokens / own_worked), round(tokens / their_worked)],
        "disk_bytes_per_id": [round(own_bytes / tokens, 2), round(their_bytes / tokens, 2)],
        "read_s": [round(own_read, 2), round(their_read, 2)],
        "forget_s": [round(own_forgot, 3), round(their_forgot, 3)],
        "forgotten_records": len(pieces),
        "forgotten_records_in_files": [remains["own"], remains["sqlite"]],
    }


def in_turn(some: Sequence[Added], storages: Sequence[Storage]) -> None:
    """Appends each record to every storage in turn."""
    for one in some:
        for files in storages:
            files.append([one])


def many_tenants_row(folder: Path) -> dict[str, Any]:
    """Microseconds of one record for each of TENANTS tenants in turn, and the files that stay open."""
    some = [Added(0, "session", PIECE * turn, array("I", range(PIECE))) for turn in range(ROUNDS)]
    own = [own_files(folder / "own", f"tenant {number}") for number in range(TENANTS)]
    before = len(os.listdir("/proc/self/fd"))
    own_took, own_worked = timed(lambda: in_turn(some, own))
    own_open = len(os.listdir("/proc/self/fd")) - before
    held = [SqliteFiles(folder / "held" / str(number)) for number in range(TENANTS)]
    held_took, held_worked = timed(lambda: in_turn(some, held))
    held_open = len(os.listdir("/proc/self/fd")) - before
    for files in held:
        files.close()

    def anew() -> None:
        for one in some:
            for number in range(TENANTS):
                files = SqliteFiles(folder / "held" / str(number))
                files.append([Added(1, one.session, one.start, one.ids)])
                files.close()

    anew_took, anew_worked = timed(anew)
    count = TENANTS * ROUNDS / 1e6
    return {
        "us_per_record": [round(own_took / count), round(held_took / count), round(anew_took / count)],
        "cpu_us_per_record": [
            round(own_worked / count),
            round(held_worked / count),
            round(anew_worked / count),
        ],
        "open_files_per_tenant": [own_open / TENANTS, held_open / TENANTS, 0],
    }


def damage_row(made: Sequence[Sequence[Added]], folder: Path) -> dict[str, Any]:
    """Flips one byte, FLIPS times each: how often what is read then is no prefix of what was written."""
    files, database = own_files(folder / "own"), SqliteFiles(folder / "sqlite")
    write(files, made)
    write(database, made)
    database.close()
    whole = {
        one[0]: one[2] for one in TenantFiles(folder / "own", "tenant", lambda _: None).open(LIMIT).listed()
    }
    choose = random.Random(4)
    wrong = {"own": 0, "sqlite": 0}
    for name, largest in (("own", max((folder / "own").rglob("*.log"))), ("sqlite", database.path)):
        for _ in range(FLIPS):
            with tempfile.TemporaryDirectory() as copied:
                shutil.copytree(folder / name, copied, dirs_exist_ok=True)
                path = Path(copied) / largest.relative_to(folder / name)
                data = bytearray(path.read_bytes())
                data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
                path.write_bytes(data)
                wrong[name] += _is_wrong(name, Path(copied), whole)
    return {"read_as_if_sound": [wrong["own"] / FLIPS, wrong["sqlite"] / FLIPS]}


def _is_wrong(name: str, folder: Path, whole: dict[int, "array[int]"]) -> bool:
    """Whether a damaged copy is read without an error and gives other ids than were written."""
    try:
        if name == "own":
            read = TenantFiles(folder, "tenant", lambda _: None).open(LIMIT).listed()
        else:
            database = SqliteFiles(folder)
            try:
                read = database.sequences()
            finally:
                database.close()
    except (sqlite3.Error, ValueError, TypeError):
        return False
    return any(ids != whole.get(serial, array("I"))[: len(ids)] for serial, _, ids in read)


def kill_row(folder: Path) -> dict[str, Any]:
    """Kills a writing process KILLS times each: how often what is left is a prefix of what was written."""
    sound = {"own": 0, "sqlite": 0}
    made = batches(400_000)
    whole: dict[int, array[int]] = {}
    for one in (one for batch in made for one in batch):
        whole.setdefault(one.serial, array("I")).extend(one.ids)
    choose = random.Random(5)
    for name in sound:
        for number in range(KILLS):
            place = folder / f"{name} {number}"
            command = module_command("retrieval.past_storage", "--write", name, str(place))
            with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(choose.uniform(0.0, 0.15))
                process.send_signal(signal.SIGKILL)
            if name == "own":
                read = TenantFiles(place, "tenant", lambda _: None).open(LIMIT).listed()
            else:
                read = SqliteFiles(place).sequences()
            sound[name] += all(ids == whole[serial][: len(ids)] for serial, _, ids in read) and bool(read)
    return {"left_a_prefix": [f"{sound['own']} of {KILLS}", f"{sound['sqlite']} of {KILLS}"]}


def write_until_killed(name: str, folder: Path) -> None:
    """Writes the records of `kill_row`, and says when it begins."""
    storage: Storage = own_files(folder) if name == "own" else SqliteFiles(folder)
    made = batches(400_000)
    storage.append(made[0])
    print("writing", flush=True)
    write(storage, made[1:])
    time.sleep(60)


def main() -> None:
    """Measures and prints the result; each pair is own files, then sqlite3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="ids to write")
    parser.add_argument("--write", nargs=2, metavar=("STORAGE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_until_killed(options.write[0], Path(options.write[1]))
        return
    made = batches(options.tokens)
    tokens = sum(len(one.ids) for batch in made for one in batch)
    rows: dict[str, Any] = {}
    for name, row in (
        ("write", lambda folder: write_row(made, tokens, folder)),
        ("many tenants", many_tenants_row),
        ("damage", lambda folder: damage_row(made[:20], folder)),
        ("kill", kill_row),
    ):
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = row(Path(folder))
        print(f"{name}: {rows[name]}", flush=True)
    settings = {"tokens": tokens, "tenants": TENANTS, "sqlite": sqlite3.sqlite_version}
    print(json.dumps({"settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
