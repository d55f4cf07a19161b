"""Processes that tests look for; each may end while they look."""

from contextlib import suppress
from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError)


def own_children() -> list[int]:
    """Process ids of this process' children; those of a thread that ends meanwhile move to another thread."""
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(*GONE):
            found += map(int, file.read_text().split())
    return found


def command_of(pid: int) -> list[bytes]:
    """The words of a process's command line; none once the process is gone."""
    with suppress(*GONE):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def own_children_running(module: str) -> list[int]:
    """Process ids of this process' children that run a module."""
    return [pid for pid in own_children() if module.encode() in command_of(pid)]
