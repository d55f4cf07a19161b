"""Has a process use a library of our own C++ as soon as there is one, cached or compiled beside it."""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

UseLibrary = Callable[[Path, Callable[[], bool], bool], bool]
"""Called with the cache folder, a function that says whether to stop, and whether to compile what the cache
lacks; returns whether the process uses the library now."""


class LibraryBuilder:
    """Gets one library from the cache, or has it compiled in a thread of its own.

    Args:
        cache_dir: folder that keeps the library for later processes; None: compile for this process alone.
        use: finds the library and puts it to use.
    """

    def __init__(self, cache_dir: Path | None, use: UseLibrary) -> None:
        self._cache_dir = cache_dir
        self._use = use
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._build, name="compile kernel", daemon=True)

    def start(self) -> None:
        """Uses a library of the cache now, and has one compiled where the cache has none."""
        if self._cache_dir is None or not self._use(self._cache_dir, self._stop.is_set, False):
            self._thread.start()

    def close(self) -> None:
        """Ends compiling; blocks until the compiler is gone."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> None:
        """Waits until the library is in use or cannot be had; a `close` by another thread ends the wait."""
        if self._thread.is_alive():
            self._thread.join()

    def _build(self) -> None:
        if self._cache_dir is not None:
            self._use(self._cache_dir, self._stop.is_set, True)
            return
        with tempfile.TemporaryDirectory(prefix="outrider-kernel-") as folder:
            self._use(Path(folder), self._stop.is_set, True)
