"""What takes until a test lets it go on, and disks that count their changes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from retrieval_service.corpus.disk import Disk

WAIT_S = 60.0


class Held:
    """A function whose calls wait until `go_on` is set.

    Attributes:
        begun: set by the first call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._function = function

    def __call__(self, *given: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        return self._function(*given)


class SteppingDisk(Disk):
    """A Disk that calls `step` before each change."""

    def step(self) -> None:
        raise NotImplementedError

    def create(self, path: Path) -> BinaryIO:
        self.step()
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        self.step()
        super().write(file, data)

    def sync_folder(self, path: Path) -> None:
        self.step()
        super().sync_folder(path)

    def rename(self, path: Path, to: Path) -> None:
        self.step()
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        self.step()
        super().remove(path)
