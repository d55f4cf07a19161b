"""The lock that gives a folder to one process; the death of its holder releases it."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from speculative.errors import OutriderError

LOCK = "lock"


class FolderInUse(OutriderError):
    """Another process has the folder."""

    code = "FAILED_PRECONDITION"


class FolderLock:
    """Makes a folder, if there is none, and holds it until `close`.

    Raises FolderInUse where another process has it, OSError where it cannot be held.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / LOCK).open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            other = self._file.read(200).decode(errors="replace").strip()
            self._file.close()
            raise FolderInUse(
                f"{folder} is in use by another process ({other}): give each process a folder of its own"
            ) from error
        except OSError:
            self._file.close()
            raise
        with suppress(OSError):  # held all the same where the disk is full
            self._file.truncate(0)
            self._file.write(f"pid {os.getpid()}\n".encode())

    def close(self) -> None:
        """Lets other processes have the folder; a second call does nothing."""
        self._file.close()
