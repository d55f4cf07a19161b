"""Resident memory and processor time of processes of this machine, as /proc reports them."""

import os
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """Bytes of a process that are in RAM now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_mb(pid: int) -> float:
    """Resident size of a process now, in MiB."""
    return _status_kb(pid, "VmRSS") / 1024


def peak_mb(pid: int) -> int:
    """Largest resident size of a process so far, in MiB."""
    return _status_kb(pid, "VmHWM") // 1024


def _status_kb(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(f"/proc/{pid}/status has no {field}")
