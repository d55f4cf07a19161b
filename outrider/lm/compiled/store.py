"""Compiled packages in the cache folder: each in a folder of its own, published whole or not at all.

A folder is filled under another name and renamed; it holds a digest of every file, checked before anything in
the folder is loaded. One process at a time compiles.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MANIFEST = "manifest.json"
_BUILDING = "building-"
_MOST_KEPT = 16
"""Number of packages that stay in the cache; the least recently used go first."""


class PackageStore:
    """The compiled packages below one folder, which the user alone may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> Path | None:
        """The folder of a package, whole by its digests; None if there is none. A broken one is removed."""
        found = self._folder / key
        try:
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
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
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

    def _sweep(self) -> None:
        """Removes what processes left that ended while they compiled; nobody else compiles now."""
        for left in self._folder.glob(f"{_BUILDING}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _evict(self) -> None:
        kept = [path for path in self._folder.iterdir() if (path / _MANIFEST).is_file()]
        for path in sorted(kept, key=_used)[:-_MOST_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


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
