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
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.tokens import TokenTable
from outrider.v1 import retrieval_pb2
from retrieval_service.corpus.errors import CorpusError
from retrieval_service.corpus.manage import discard
from retrieval_service.corpus.texts import PIECE
from speculative.errors import InvalidRequest, OutriderError, Overloaded, Superseded

log = logging.getLogger(__name__)

RETRY_AFTER_S = 60.0
INCOMING = ".incoming-"
IDS_AT_ONCE = 1 << 16


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


class Spool:
    """A temporary file of documents on their way into a corpus; a context manager removes it."""

    def __init__(self, folder: Path, tokens: TokenTable, most_mb: int) -> None:
        self._tokens = tokens
        self._most = most_mb << 20
        self._size = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix=INCOMING, dir=folder)
        self._lock = _locked(Path(self._folder.name))
        self.tokenizer = Path(self._folder.name) / "tokenizer.json"
        self.path = Path(self._folder.name) / "documents"
        self._file = self.path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        try:
            self.tokenizer.write_text(self._tokens.to_json(), encoding="utf-8")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # the rest of the text, on a full disk
            self._file.close()
        self._folder.cleanup()
        os.close(self._lock)

    def add(self, message: retrieval_pb2.BuildCorpusRequest) -> None:
        """Adds a document to the spool. Raises InvalidRequest, or Overloaded if there is too much text."""
        if message.HasField("ids"):
            self._write({"ids": document_ids(message.ids, self._tokens)})
        elif message.HasField("text"):
            for start in range(0, len(message.text), PIECE):
                self._write({"text": message.text[start : start + PIECE]})
        else:
            raise InvalidRequest("after the first message each is a document: `text` or `ids`")

    def flush(self) -> None:
        """Writes the buffered documents to the spool's file."""
        self._file.flush()

    def _write(self, document: dict[str, object]) -> None:
        line = json.dumps(document)
        self._size += len(line)
        if self._size > self._most:
            raise Overloaded(f"the documents have more than {self._most >> 20} MiB", RETRY_AFTER_S)
        self._file.write(line + "\n")


def remove_left(folder: Path) -> None:
    """Removes the spools that processes which died have left."""
    for path in folder.glob(f"{INCOMING}*"):
        with contextlib.suppress(OSError):  # of another process, which takes documents in just now
            lock = _locked(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


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
    """The corpus builds under way, at most one for each corpus."""

    def __init__(self) -> None:
        self._paths: set[Path] = set()

    @contextlib.contextmanager
    def only(self, path: Path) -> Iterator[None]:
        """Keeps other calls from building or removing this corpus. Raises Superseded if one does so now."""
        if path in self._paths:
            raise Superseded(f"corpus {path.name!r} is being built already; wait for it")
        self._paths.add(path)
        try:
            yield
        finally:
            self._paths.discard(path)

    async def run(self, path: Path, spool: Spool, tokens: TokenTable, owner: str | None) -> None:
        """Builds a corpus at `path` from a spool. Raises BuildFailed."""
        await asyncio.to_thread(spool.flush)
        command = ["-P", "-m", "retrieval_service.ingest", "--parent-pid", str(os.getpid())]
        task = [str(path), str(spool.path), str(spool.tokenizer), owner or ""]
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
            await asyncio.to_thread(discard, path)
        except CorpusError as error:
            log.warning("left as it is: %s", error)


def _failure(path: Path, output: bytes, status: int) -> BuildFailed:
    try:
        error = json.loads(output)["error"]
        return BuildFailed(error["message"], error["code"])
    except (ValueError, KeyError, TypeError):
        return BuildFailed(f"the build of {path.name!r} ended with exit status {status}", "INTERNAL")
