"""Learnt weights on the disk: a folder for each version, and a file that says which one serves.

The file is replaced in one rename, after the weights are whole. Whatever a crash leaves half done is not
named in the file, and goes at the next start. Where the file cannot be replaced, the folder keeps the weights
that it names beside those that serve.
"""

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outrider.folder_lock import LOCK, FolderInUse, FolderLock
from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

BASE = 0
"""Version of the weights that the service was given."""
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class VersionState:
    """Which versions there are."""

    owner: str
    """`LearnOwner.label` of whom these weights belong to."""
    base: str
    """Digest of the weights that the service was given."""
    current: int = BASE
    """Version that serves."""
    previous: int = BASE
    """Version that served before the current one."""
    last: int = BASE
    """Highest version that was ever begun; numbers are not used again."""


class WeightVersions:
    """The versions in one folder, which one process at a time may use.

    Args:
        folder: made if it is missing, readable by this user alone.
        model: folder or id of the given weights.

    Raises InvalidRequest where the folder is in use, cannot be written to, holds weights of another owner or
    model, or other files.
    """

    def __init__(self, folder: Path, model: str, owner: str, base: str) -> None:
        self._folder = folder
        self._model = model
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(folder)
            try:
                self.state = self._noted = self._read(VersionState(owner, base))
                folder.chmod(0o700)
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise InvalidRequest(
                f"{folder} cannot keep weights ({error}): give a --learn-dir that this user can write to"
            ) from error
        self.drop()

    def name_of(self, version: int) -> str:
        """Folder or id of a version's weights."""
        return self._model if version == BASE else str(self._folder / str(version))

    @property
    def earlier(self) -> list[int]:
        """Versions that can come back in place of the current one."""
        return sorted({BASE, self.state.previous} - {self.state.current})

    def begin(self) -> int:
        """The number of a new version, whose weights its maker writes to `name_of(number)`.

        Raises OSError where the folder cannot be written to.
        """
        self._write(replace(self.state, last=self.state.last + 1))
        self.state = self._noted
        return self.state.last

    def use(self, version: int) -> None:
        """Has a version serve from now on; after a restart as well, if the folder can be written to."""
        self._serve(replace(self.state, current=version, previous=self.state.current))

    def drop(self) -> None:
        """Removes what no version that can serve needs, such as weights that were not good enough."""
        try:
            self._clean()
        except OSError as error:
            log.warning("weights that no longer serve cannot be removed from %s: %s", self._folder, error)

    def give_up(self) -> None:
        """Goes back to the given weights for good; for learnt weights that do not load."""
        self._serve(replace(self.state, current=BASE, previous=BASE))

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.close()

    def _read(self, fresh: VersionState) -> VersionState:
        path = self._folder / _STATE
        if not path.exists():
            others = {one.name for one in self._folder.iterdir()} - {LOCK, f"{_STATE}.partial"}
            if others:
                raise InvalidRequest(
                    f"{self._folder} holds {min(others)!r} and no {_STATE}: give --learn-dir an empty folder"
                )
            return fresh
        try:
            found = VersionState(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{path} cannot be read ({error}): remove {self._folder}") from error
        if (found.owner, found.base) != (fresh.owner, fresh.base):
            raise InvalidRequest(
                f"{self._folder} holds weights of {found.owner} learnt from model {found.base[:12]}; those "
                f"given are of {fresh.owner} with model {fresh.base[:12]}: give another --learn-dir, or "
                "remove this one"
            )
        if found.current != BASE and not (self._folder / str(found.current)).is_dir():
            raise InvalidRequest(f"{self._folder} lacks its version {found.current}: remove {self._folder}")
        return found

    def _serve(self, state: VersionState) -> None:
        self.state = state  # whatever becomes of the file: these weights serve
        try:
            self._write(state)
        except OSError as error:
            log.warning(
                "%s does not say that version %d serves (%s): a restart goes back to version %d",
                self._folder / _STATE,
                state.current,
                error,
                self._noted.current,
            )
        self.drop()

    def _write(self, state: VersionState) -> None:
        partial = self._folder / f"{_STATE}.partial"
        with partial.open("w") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._folder / _STATE)
        self._noted = state

    def _clean(self) -> None:
        """Removes versions that were begun here and cannot serve; nothing else in the folder."""
        states = (self.state, self._noted)
        needed = {str(version) for one in states for version in (one.current, one.previous)}
        for path in self._folder.iterdir():
            number = path.name.partition(".")[0]
            begun_here = number.isdecimal() and int(number) <= self.state.last
            if begun_here and path.is_dir() and path.name not in needed:
                shutil.rmtree(path)


def _locked(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except FolderInUse as error:
        raise InvalidRequest(f"{folder} is in use: give each process a --learn-dir of its own") from error
