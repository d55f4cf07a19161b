"""The few things done to files: written to stay, cut, and removed so that little can be read of them."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_ZEROS = bytes(1 << 20)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_new(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file durably; returns its bytes. Raises OSError, and may then leave a part of the file."""
    handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        size = 0
        waiting = bytearray()
        for piece in pieces:
            waiting += piece
            if len(waiting) >= len(_ZEROS):
                size += write_at(handle, waiting, size)
                waiting.clear()
        size += write_at(handle, waiting, size)
        os.fsync(handle)
    finally:
        os.close(handle)
    return size


def write_at(handle: int, data: bytes | bytearray, at: int) -> int:
    """Write all of `data` at offset `at`; returns its length in bytes."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, at)
        view = view[written:]
        at += written
    return len(data)


def beginning(path: Path) -> bytes:
    """The first bytes of a file, enough to hold its header."""
    with path.open("rb") as file:
        return file.read(4096)


def append(path: Path, data: bytes | bytearray, at: int) -> None:
    """Write `data` after the first `at` bytes of a file. Raises OSError; a part may have been written."""
    handle = os.open(path, os.O_WRONLY)
    try:
        write_at(handle, data, at)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Make a file's contents durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def truncate(path: Path, size: int) -> None:
    """Cut a file to `size` bytes, durably."""
    os.truncate(path, size)
    sync_file(path)


def shred(path: Path) -> None:
    """Overwrite a file with zeros, then remove it. Raises OSError where it cannot be removed.

    Overwriting is all a program can do: file systems that copy on write, and disks, may keep old blocks.
    """
    with suppress(OSError):
        size = path.stat().st_size
        handle = os.open(path, os.O_WRONLY)
        try:
            for at in range(0, size, len(_ZEROS)):
                write_at(handle, _ZEROS[: size - at], at)
            os.fsync(handle)
        finally:
            os.close(handle)
    path.unlink(missing_ok=True)
