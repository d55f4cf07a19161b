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
        """Creates an empty file and opens it for writing, unbuffered."""
        return open(path, "wb", buffering=0)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        """Writes all of `data` to a file."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:
        """Makes a file's contents durable: they survive a loss of power."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Renames a file; replaces `to` atomically."""
        os.replace(path, to)

    def remove(self, path: Path) -> None:
        """Removes a file, if it exists."""
        path.unlink(missing_ok=True)

    def put(self, path: Path, data: bytes) -> None:
        """Replaces a small file atomically: at any moment it holds the old contents or the new."""
        beside = path.with_name(f"{path.name}.tmp")
        with self.create(beside) as file:
            self.write(file, data)
            self.sync(file)
        self.rename(beside, path)
        self.sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Creates a folder with its parents. Raises CorpusError where that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be a folder: {error.strerror}") from error
