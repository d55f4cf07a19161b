"""Runs a compiler in a child process, within bounds of time and disk, and explains how it failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.compiling.store import CompileFailed, PackageStore

_POLL_S = 0.2
_MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Bounds of one compilation."""

    seconds: float = 900.0
    """Longest duration."""
    megabytes: int = 2048
    """Largest size of what the child writes, in MiB."""


def build_in(
    store: PackageStore,
    key: str,
    names: tuple[str, ...],
    command: Callable[[Path], Sequence[str]],
    is_stopped: Callable[[], bool],
    limits: BuildLimits,
) -> Path:
    """Runs a command that leaves the files ``names`` in an empty folder; returns their package's folder.

    Waits while another process compiles below the same cache folder. Raises CompileFailed where compiling
    fails, exceeds a limit, or ``is_stopped`` becomes true. ``command`` gets the folder.
    """

    def wait() -> bool:
        time.sleep(_POLL_S)
        return is_stopped()

    try:
        with store.turn(wait) as free:
            if not free:
                raise CompileFailed("it was stopped")
            # The process that compiled before may have compiled the same.
            if (found := store.find(key)) is not None:
                return found
            with store.building() as folder:
                _run(command(folder), folder, is_stopped, limits)
                return store.publish(folder, key, names)
    except OSError as error:
        raise CompileFailed(f"the cache folder cannot be written: {error}") from error


def _run(command: Sequence[str], folder: Path, is_stopped: Callable[[], bool], limits: BuildLimits) -> None:
    """Runs the child until it ends, or ends it and all that it started."""
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
    }
    deadline = time.monotonic() + limits.seconds
    with (folder / _MESSAGES).open("wb") as messages:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env=environment,
            start_new_session=True,
        )
    try:
        while (status := child.poll()) is None:
            if is_stopped():
                raise CompileFailed("it was stopped")
            if time.monotonic() > deadline:
                raise CompileFailed(f"the compiler took longer than {limits.seconds:g} s")
            if _megabytes(folder) > limits.megabytes:
                raise CompileFailed(f"the compiler wrote more than {limits.megabytes} MiB")
            time.sleep(_POLL_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if status != 0:
        raise CompileFailed(_why(folder, status))


def _why(folder: Path, status: int) -> str:
    """The compiler's first error, or else the child's last words; where it had none, how it ended."""
    said = (folder / _MESSAGES).read_text(errors="replace").strip().splitlines()
    if said and status > 0:
        return next((line for line in said if " error: " in line), said[-1])[:300]
    return f"the compiling process ended with {f'signal {-status}' if status < 0 else f'status {status}'}"


def _megabytes(folder: Path) -> float:
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(at, name)).st_size
            except OSError:
                continue  # the compiler removes files as it goes
    return total / 2**20
