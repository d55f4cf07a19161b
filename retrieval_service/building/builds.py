"""Builds corpora over the wire: spools documents to disk and builds them in a process of its own."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from outrider.tokens import TokenTable
from outrider.v1 import retrieval_pb2
from retrieval_service.corpus.bounded_disk import BoundedDisk
from retrieval_service.corpus.errors import CorpusError
from retrieval_service.corpus.manage import discard, is_unfinished
from retrieval_service.corpus.texts import PIECE
from retrieval_service.turns import Turns, in_thread
from speculative.errors import InvalidRequest, OutriderError, Overloaded, Superseded

log = logging.getLogger(__name__)

RETRY_AFTER_S = 60.0
INCOMING = ".incoming-"
IDS_AT_ONCE = 1 << 16
BUILDS_OF_A_TENANT = 4
"""Corpora of one tenant that are built over the wire at once."""


class NoTokenizer(OutriderError):
    """The service has no tokenizer, so that it has no corpora either."""

    code = "FAILED_PRECONDITION"


class BuildFailed(OutriderError):
    """A build failed; `code` is the name of a gRPC status."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def document_ids(document: retrieval_pb2.DocumentIds, tokens: TokenTable | None) -> list[int]:
    """A document's token ids. Raises InvalidRequest for no ids, or an id that the tokenizer does not have."""
    ids: list[int] = []
    for start in range(0, len(document.ids), IDS_AT_ONCE):  # other threads run between two pieces
        ids += document.ids[start : start + IDS_AT_ONCE]
    if not ids:
        raise InvalidRequest("a document has no ids")
    if tokens is not None and max(ids) >= tokens.size:
        raise InvalidRequest(f"a document has id {max(ids)}; this tokenizer's are below {tokens.size}")
    return ids


class SpoolRoom:
    """Room on the disk for the documents of one tenant that are on their way into corpora. For any thread."""

    def __init__(self, most_mb: int) -> None:
        self.most_mb = most_mb
        """MiB that all builds of the tenant may bring together."""
        self._left = most_mb << 20
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Takes room for `size` bytes. Raises Overloaded where there is none."""
        with self._lock:
            if size > self._left:
                raise Overloaded(
                    f"the documents of the tenant's builds have more than {self.most_mb} MiB (ingest_mb); "
                    "wait for other builds, or build several corpora",
                    RETRY_AFTER_S,
                )
            self._left -= size

    def give_back(self, size: int) -> None:
        """Returns room that was taken."""
        with self._lock:
            self._left += size


class Spool:
    """A temporary file of documents on their way into a corpus; an `async with` statement removes it."""

    def __init__(self, folder: Path, tokens: TokenTable, room: SpoolRoom) -> None:
        self._tokens = tokens
        self._room = room
        self._size = 0
        self._writing = threading.Lock()
        self._is_over = False
        self._lock: int | None = None
        self._file: TextIO | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix=INCOMING, dir=folder)
        self.tokenizer = Path(self._folder.name) / "tokenizer.json"
        self.path = Path(self._folder.name) / "documents"

    async def __aenter__(self) -> Self:
        try:
            self._lock = _locked(
                Path(self._folder.name)
            )  # at once: another process removes what is not locked
            await in_thread(self._open)
        except BaseException:
            self._remove()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()  # here and now: a call of a server that stops may get no other turn

    def _open(self) -> None:
        """Opens the files; in a thread, as the tokenizer may have many MB."""
        self._file = self.path.open("w", encoding="utf-8")
        self.tokenizer.write_text(self._tokens.to_json(), encoding="utf-8")

    def _remove(self) -> None:
        with self._writing:  # a thread may still add a document of a call that was cancelled
            self._is_over = True
            self._room.give_back(self._size)
            if self._file is not None:
                with contextlib.suppress(OSError):  # the rest of the text, on a full disk
                    self._file.close()
        try:
            self._folder.cleanup()
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def add(self, message: retrieval_pb2.BuildCorpusRequest) -> None:
        """Adds a document to the spool. Raises InvalidRequest, or Overloaded if there is too much text."""
        if message.HasField("ids"):
            self._write({"ids": document_ids(message.ids, self._tokens)})
        elif message.HasField("text"):
            if not message.text:
                raise InvalidRequest("a document has no text")
            for start in range(0, len(message.text), PIECE):
                self._write({"text": message.text[start : start + PIECE]})
        else:
            raise InvalidRequest("after the first message each is a document: `text` or `ids`")

    def flush(self) -> None:
        """Writes the buffered documents to the spool's file."""
        self._open_file().flush()

    def _write(self, document: dict[str, object]) -> None:
        line = json.dumps(document)
        with self._writing:
            file = self._open_file()
            self._room.take(len(line))
            self._size += len(line)
            file.write(line + "\n")

    def _open_file(self) -> TextIO:
        if self._file is None or self._is_over:
            raise ValueError("the spool is not open")
        return self._file


def remove_left(folder: Path) -> None:
    """Removes spools and unfinished builds that dead processes have left. Call it while no build runs."""
    for path in folder.glob(f"{INCOMING}*"):
        with contextlib.suppress(OSError):  # of another process, which takes documents in just now
            lock = _locked(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    for path in folder.glob("*/*/"):
        try:
            if is_unfinished(path):
                discard(path)
        except (CorpusError, OSError) as error:  # damaged, or another process builds or removes it just now
            log.warning("left as it is: %s", error)


def _locked(folder: Path) -> int:
    """Locks a folder; its holder's death releases the lock. Raises OSError if another process holds it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


class Builds:
    """The corpus builds under way, at most one for each corpus and BUILDS_OF_A_TENANT for each tenant.

    Args:
        most_mb: documents that all builds of a tenant may bring together, in MiB.
        corpora_mb: room on the disk for all corpora of a tenant, in MiB, and as much for the public ones.
    """

    def __init__(self, most_mb: int, corpora_mb: int) -> None:
        self._paths: set[Path] = set()
        self._most_mb = most_mb
        self._corpora_mb = corpora_mb
        self._rooms: dict[str | None, SpoolRoom] = {}
        """By tenant, of the tenants that build now; None: public corpora."""
        self._loading: Turns[Path] = Turns()
        self._writing: Turns[str | None] = Turns()
        """By tenant: the holder writes corpora of this tenant."""
        self._running: Counter[str | None] = Counter()

    @contextlib.contextmanager
    def room(self, owner: str | None) -> Iterator[SpoolRoom]:
        """Room for the documents of one more build of this tenant. Raises Overloaded for a build too many."""
        if self._running[owner] >= BUILDS_OF_A_TENANT:
            raise Overloaded(
                f"{BUILDS_OF_A_TENANT} corpora of the tenant are being built already; wait for one",
                RETRY_AFTER_S,
            )
        self._running[owner] += 1
        try:
            yield self._rooms.setdefault(owner, SpoolRoom(self._most_mb))
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner], self._rooms[owner]

    @contextlib.contextmanager
    def building(self, path: Path) -> Iterator[None]:
        """Keeps other calls from building or removing this corpus. Raises Superseded if one does so now."""
        if path in self._paths:
            raise Superseded(f"corpus {path.name!r} is being built already; wait for it")
        self._paths.add(path)
        try:
            yield
        finally:
            self._paths.discard(path)

    def loading(self, path: Path) -> AbstractAsyncContextManager[None]:
        """Context in which no other call loads or removes this corpus; waits for calls that do.

        So no call adds a corpus whose files were removed or replaced after the call opened them. Use
        `in_thread` for work on the files: a call that is cancelled then keeps its turn until that work ends.
        """
        return self._loading.of(path)

    async def check_room(self, path: Path) -> None:
        """Raises OSError where the owner's corpora leave no room on the disk for a corpus at `path`."""
        await asyncio.to_thread(BoundedDisk(path, self._corpora_mb).check_room)

    async def run(self, path: Path, spool: Spool, owner: str | None) -> None:
        """Builds a corpus at `path` from a spool, after the owner's other builds. Raises BuildFailed.

        One after another, because two builds at once would each count on the room that is left on the disk.
        """
        await asyncio.to_thread(spool.flush)
        async with self._writing.of(owner):
            await self._run(path, spool, owner)

    async def _run(self, path: Path, spool: Spool, owner: str | None) -> None:
        command = ["-P", "-m", "retrieval_service.building.ingest", "--parent-pid", str(os.getpid())]
        task = [str(path), str(spool.path), str(spool.tokenizer), owner or "", str(self._corpora_mb)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        path.parent.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *task, stdout=asyncio.subprocess.PIPE, env=environment
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
                await self._discard(path)
        if process.returncode != 0:
            await self._discard(path)
            raise _failure(path, output, process.returncode or 0)

    async def _discard(self, path: Path) -> None:
        """Removes the files of a failed build: no later build would continue from them."""
        try:
            await in_thread(discard, path)
        except CorpusError as error:
            log.warning("left as it is: %s", error)


def _failure(path: Path, output: bytes, status: int) -> BuildFailed:
    try:
        error = json.loads(output)["error"]
        return BuildFailed(error["message"], error["code"])
    except (ValueError, KeyError, TypeError):
        return BuildFailed(f"the build of {path.name!r} ended with exit status {status}", "INTERNAL")
