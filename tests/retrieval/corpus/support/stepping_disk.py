"""A disk that counts, delays or ends its changes."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO

from retrieval_service.corpus.disk import Disk


class SteppingDisk(Disk, ABC):
    """A Disk that calls `step` before each change."""

    @abstractmethod
    def step(self) -> None:
        """Called before each change."""

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
