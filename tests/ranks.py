"""Starts and ends the ranks of one group as processes of a test."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A free port below those that the system hands out, which no other process gets before the ranks."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def ranks(command: Sequence[str], log: Path, size: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs `python COMMAND` as `size` ranks without torchrun; none is left after the block."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(spawn(command, log.with_suffix(f".{rank}"), {**common, **own}))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def spawn(
    command: Sequence[str], log: Path, variables: dict[str, str], **how: Any
) -> subprocess.Popen[bytes]:
    """Starts `python COMMAND` in the repository with its standard error in a log file."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
            **how,
        )


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, in ascending order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill_if_there(pid: int) -> None:
    if is_running(pid):
        os.kill(pid, signal.SIGKILL)
