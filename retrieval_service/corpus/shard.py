"""Writing a shard: its text as it comes, then the order of its suffixes, each file hashed and synced."""

import hashlib
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from retrieval_service.corpus.disk import Disk
from retrieval_service.corpus.layout import ENTRY_IDS, STRIDE, FileRecord, ShardRecord, width_of
from retrieval_service.corpus.suffixes import CHUNK, Ids, order_suffixes

BUFFER_BYTES = 1 << 20


class FileWriter:
    """Writes and hashes a file; a `with` block closes it at the latest."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._file = disk.create(path)
        self._path = path
        self._hash = hashlib.blake2b(digest_size=32)
        self._buffer = bytearray()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Buffers data, and writes once there is enough."""
        self._buffer += data
        if len(self._buffer) >= BUFFER_BYTES:
            self._flush()

    def finish(self) -> FileRecord:
        """Writes the rest, syncs and closes the file; returns its record."""
        with self._file:
            self._flush()
            self._disk.sync(self._file)
        return FileRecord(self._path.name, self._bytes, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def abandon(self) -> None:
        """Closes and removes the file."""
        self._file.close()
        self._disk.remove(self._path)

    def _flush(self) -> None:
        if self._buffer:
            self._disk.write(self._file, self._buffer)
            self._hash.update(self._buffer)
            self._bytes += len(self._buffer)
            self._buffer = bytearray()


class ShardWriter:
    """Takes documents until `room` is used up; then `finish`, or `abandon`. Raises OSError."""

    def __init__(self, disk: Disk, folder: Path, stem: str, vocabulary: int, limit: int) -> None:
        width = width_of(vocabulary)
        self._disk, self._folder, self._stem = disk, folder, stem
        self._vocabulary = vocabulary
        self._dtype = np.dtype(f">u{width}")
        self._separator = b"\xff" * width
        self._text: FileWriter | None = FileWriter(disk, folder / f"{stem}.text")
        self.room = limit
        """Ids and separators that still fit."""
        self.tokens = self.documents = 0

    def add(self, ids: npt.NDArray[np.uint32]) -> None:
        """Adds a document, at least one id, that fits `room`. Raises ValueError for an id out of range."""
        assert self._text is not None
        assert 0 < len(ids) < self.room
        if int(ids.max()) >= self._vocabulary:
            raise ValueError(f"id {ids.max()} is outside the vocabulary of {self._vocabulary}")
        self._text.write(ids[::-1].astype(self._dtype).tobytes())
        self._text.write(self._separator)
        self.room -= len(ids) + 1
        self.tokens += len(ids)
        self.documents += 1

    def finish(self) -> ShardRecord:
        """Sorts the suffixes, which takes most of a build's time and memory; returns the shard's record."""
        assert self._text is not None
        written = self._text.finish()
        self._text = None
        text: Ids = np.fromfile(self._folder / written.name, dtype=self._dtype)
        order = order_suffixes(text, 2 ** (8 * self._dtype.itemsize) - 1)
        with FileWriter(self._disk, self._folder / f"{self._stem}.suffixes") as file:
            for start in range(0, len(order), CHUNK):
                file.write(order[start : start + CHUNK].data.cast("B"))
            suffixes = file.finish()
        size = ENTRY_IDS * self._dtype.itemsize
        with FileWriter(self._disk, self._folder / f"{self._stem}.directory") as file:
            for position in order[::STRIDE].tolist():
                file.write(text[position : position + ENTRY_IDS].tobytes().ljust(size, b"\0"))
            directory = file.finish()
        return ShardRecord(self.tokens, self.documents, len(order), written, suffixes, directory)

    def abandon(self) -> None:
        """Removes the text written so far; does nothing after `finish`."""
        if self._text is not None:
            self._text.abandon()
            self._text = None
