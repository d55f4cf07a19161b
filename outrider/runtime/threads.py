"""Processor cores that this process may use, and the number of threads to compute with."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_limit(cgroup: Path = CGROUP) -> float:
    """Number of cores that this process may use: the lower of its affinity and its container's quota."""
    available = float(len(os.sched_getaffinity(0)))
    return min(available, _quota(cgroup) or available)


def default_threads() -> int:
    """Number of compute threads: all cores but one, as computing on all stalls once anything else runs."""
    return max(1, int(cpu_limit()) - 1)


def _quota(cgroup: Path) -> float | None:
    """Quota of processor time in cores, from version 2 or 1 of control groups; None without a quota."""
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
