"""A bound on the disk that the corpora of one owner take together.

The owner's corpora lie side by side in one folder. A build that would exceed the bound fails as it does on a
full disk.
"""

import errno
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from retrieval_service.corpus.disk import Disk
from retrieval_service.corpus.layout import is_ours
from retrieval_service.corpus.plan import old_header

SMALLEST_FILE = 4096
"""Bytes that a smaller file counts as: it takes a block of the disk."""


class BoundedDisk(Disk):
    """The disk for building one corpus; the corpus and its neighbours may have `most_mb` together.

    The corpus that the new one replaces does not count. Methods raise OSError with EDQUOT where the bound
    would be exceeded.

    Args:
        corpus: the folder of the corpus; its parent holds the owner's corpora and nothing else.
        most_mb: MiB on the disk.
    """

    def __init__(self, corpus: Path, most_mb: int) -> None:
        self._corpus = corpus
        self._most_mb = most_mb
        self._left = 0

    def check_room(self) -> None:
        """Counts the files of all corpora; raises OSError where there is no room for one more file."""
        replaced = old_header(self._corpus)
        self._left = self._most_mb << 20
        if self._corpus.parent.is_dir():
            for path in self._corpus.parent.iterdir():
                left_out = replaced.names if replaced is not None and path == self._corpus else frozenset()
                self._left -= _size_of(path, left_out)
        self._take(SMALLEST_FILE)

    def create(self, path: Path) -> BinaryIO:
        """Creates an empty file and opens it for writing, unbuffered."""
        self.check_room()  # again: other builds of the owner may be under way
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        """Writes all of `data` to a file, or nothing where there is no room for all of it."""
        self._take(memoryview(data).nbytes)
        super().write(file, data)

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise OSError(
                errno.EDQUOT,
                f"the owner's corpora would take more than {self._most_mb} MiB together "
                "(corpora_mb_of_tenant); remove one of them",
            )


def _size_of(corpus: Path, left_out: frozenset[str]) -> int:
    """Bytes of the files of one corpus, without the files of some names."""
    size = 0
    with suppress(FileNotFoundError, NotADirectoryError):  # the corpus is removed meanwhile
        for path in corpus.iterdir():
            if is_ours(path.name) and path.name not in left_out:
                with suppress(FileNotFoundError):  # a build replaces the file meanwhile
                    size += max(SMALLEST_FILE, path.stat().st_size)
    return size
