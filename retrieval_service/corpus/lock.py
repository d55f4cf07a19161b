"""The lock that keeps a corpus to one writer; the death of its holder releases it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from retrieval_service.corpus.errors import CorpusError, Held
from retrieval_service.corpus.layout import LOCK


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the corpus' lock inside the block.

    Raises Held, which names the holder, at once where another process has the lock, and CorpusError where the
    folder cannot be written.
    """
    try:
        descriptor = _acquire(folder)
    except OSError as error:
        raise CorpusError(f"{folder}: cannot be written: {error}") from error
    try:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with suppress(OSError):  # held all the same; the next write reports a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0
            )
        yield
    finally:
        os.close(descriptor)


def _acquire(folder: Path) -> int:
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever removes a corpus removes this file while others may be opening it.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise Held(f"{folder}: being written by {holder}: wait for it, or end it") from None
        os.close(descriptor)
