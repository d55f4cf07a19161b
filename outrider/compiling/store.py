"""Compiled packages in the cache folder: each in a folder of its own, published whole or not at all.

A folder is filled under another name and renamed; it holds a digest of every file, checked before anything in
the folder is loaded. The digests lie in the same folder and only prove that a package is whole, so nothing is
loaded from a folder where another user could have placed files. One process at a time compiles.
"""

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MANIFEST = "manifest.json"
_BUILDING = "building-"
_MOST_KEPT = 16
"""Number of packages that stay in the cache; the least recently used go first."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CompileFailed(Exception):
    """A package could not be compiled or loaded; the message says why, for a log line."""


class NeverCompiled(CompileFailed):
    """Passes of this model are never compiled, on any machine; this is no fault."""


class PackageStore:
    """The compiled packages below one folder, which this process' user owns and nobody else may write.

    Methods raise CompileFailed where the folder, or that of a package, is not so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> Path | None:
        """The folder of a package, whole by its digests; None if there is none. A broken one is removed."""
        found = self._folder / key
        try:
            _require_own(self._folder)
            _require_own(found)
            manifest = json.loads((found / _MANIFEST).read_text())
            if manifest != _digests(found):
                raise ValueError("a file differs from its digest")
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self.remove(key)
            return None
        with suppress(OSError):
            os.utime(found)
        return found

    def remove(self, key: str) -> None:
        """Removes a package that cannot be used."""
        shutil.rmtree(self._folder / key, ignore_errors=True)

    @contextmanager
    def building(self) -> Iterator[Path]:
        """An empty folder to compile in; removed on leaving unless it was published."""
        self._prepare()
        made = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self._folder))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def publish(self, built: Path, key: str, names: tuple[str, ...]) -> Path:
        """Makes the files ``names`` of a folder the package of this key; returns the package's folder."""
        with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=self._folder) as holder:
            whole = Path(holder) / key
            whole.mkdir(mode=0o700)
            for name in names:
                (built / name).rename(whole / name)
            (whole / _MANIFEST).write_text(json.dumps(_digests(whole)))
            target = self._folder / key
            with suppress(OSError):  # another process has published it meanwhile
                whole.rename(target)
        self._evict()
        return target

    @contextmanager
    def turn(self, wait: Callable[[], bool]) -> Iterator[bool]:
        """Holds the right to compile while entered; False if ``wait`` gave up before it was free."""
        self._prepare()
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if wait():
                        yield False
                        return
            self._sweep()
            yield True
        finally:
            os.close(lock)

    def _prepare(self) -> None:
        """Makes the folder of packages where there is none."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(self._folder)

    def _sweep(self) -> None:
        """Removes what processes left that ended while they compiled; nobody else compiles now."""
        for left in self._folder.glob(f"{_BUILDING}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _evict(self) -> None:
        kept = [path for path in self._folder.iterdir() if (path / _MANIFEST).is_file()]
        for path in sorted(kept, key=_used)[:-_MOST_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def _require_own(folder: Path) -> None:
    """Raises CompileFailed unless ``folder`` is a directory, no link, that only this process' user can write.

    Raises FileNotFoundError where there is no such folder.
    """
    found = folder.lstat()
    user = os.geteuid()
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise CompileFailed(f"{folder} is {kind}; remove it, or set cache_dir to another folder")
    if found.st_uid != user:
        raise CompileFailed(
            f"{folder} belongs to user {found.st_uid}, but this process runs as user {user} and loads"
            " code from its own folders alone; set cache_dir to a folder of this user"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise CompileFailed(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}, so other users could place code in it;"
            " remove it, or set cache_dir to a folder that only this user may write"
        )


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a package, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != _MANIFEST
    }
