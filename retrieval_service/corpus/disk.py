"""Every change that a build makes on disk, in one place: a test stops it after any of them.

A file that is to replace another one is written beside it, synced, and renamed; then the folder is synced.
"""

import os
from pathlib import Path
from typing import BinaryIO

from retrieval_service.corpus.errors import CorpusError


class Disk:
    """The file system as builds use it. Raises OSError."""

    def create(self, path: Path) -> BinaryIO:
        """An empty file, open for writing, without a buffer."""
        return open(path, "wb", buffering=0)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        """All of `data`."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:
        """Until what was written survives a loss of power."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """The same for the names in a folder."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Replaces `to` at once."""
        os.replace(path, to)

    def remove(self, path: Path) -> None:
        """Nothing happens where there is none."""
        path.unlink(missing_ok=True)

    def put(self, path: Path, data: bytes) -> None:
        """A whole small file: afterwards, and at any moment between, it holds the old text or the new one."""
        beside = path.with_name(f"{path.name}.tmp")
        with self.create(beside) as file:
            self.write(file, data)
            self.sync(file)
        self.rename(beside, path)
        self.sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Raises CorpusError where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be a folder: {error.strerror}") from error
