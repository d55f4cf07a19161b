"""Values read from files, and read again when the files change: certificates, keys of clients.

Where a file becomes invalid while a process runs, the log says so and the former value stays in use.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Shortest time between two checks of the files, in seconds."""

Value = TypeVar("Value")
_Signature = tuple[tuple[int, int, int, int] | None, ...]


class Reloaded(Generic[Value]):
    """The present value of some files. Safe in any thread; costs a `stat` of each file once per `every_s`.

    Args:
        files: paths by the name of the setting that gave them.
        read: makes the value from the files' contents, by the same names. Raises InvalidRequest.
        every_s: shortest time between two checks of the files, in seconds.
        clock: monotonic seconds.

    Raises InvalidRequest where the files cannot be read at first.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        read: Callable[[Mapping[str, bytes]], Value],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = dict(files)
        self._read = read
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        # Taken before the files are read: a file that changes meanwhile is read again.
        self._signature = self._sign()
        self._value = self._read_all()

    def current(self) -> Value:
        """The value of the files; the same object until they change."""
        now = self._clock()
        if now - self._looked >= self._every_s:
            with self._lock:
                if now - self._looked >= self._every_s:
                    self._looked = now
                    self._look()
        return self._value

    def _look(self) -> None:
        signature = self._sign()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._value = self._read_all()
        except InvalidRequest as error:
            log.error("%s; what was read before goes on", error)
        else:
            log.info("read again", extra={"fields": {"files": ", ".join(map(str, self._files.values()))}})

    def _read_all(self) -> Value:
        return self._read({name: _contents(name, path) for name, path in self._files.items()})

    def _sign(self) -> _Signature:
        return tuple(map(_signature, self._files.values()))


def _contents(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{name}: {str(path)!r} cannot be read ({error.strerror or type(error).__name__}); "
            "put the file there, readable to this process"
        ) from error


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
