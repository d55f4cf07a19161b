"""How many processor cores this process may use, and how many threads to compute with."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_limit(cgroup: Path = CGROUP) -> float:
    """Cores that this process may use: its affinity, or its container's quota where that is less."""
    available = float(len(os.sched_getaffinity(0)))
    return min(available, _quota(cgroup) or available)


def default_threads() -> int:
    """All but one of the cores: computing on every one stalls as soon as anything else runs."""
    return max(1, int(cpu_limit()) - 1)


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time per period, as the second or the first version of control groups states it."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu/cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError):
        return None
