"""Processor cores that this process may use, and the numbers of threads to compute with."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

CGROUP = Path("/sys/fs/cgroup")
_MOST = 1024
"""The most threads that a setting can ask for."""


def _checked(threads: Any) -> Any:
    if threads == "auto" or (str(threads).isdecimal() and 1 <= int(threads) <= _MOST):
        return threads
    raise ValueError(f"give auto, or a number from 1 to {_MOST}")


Threads = Annotated[Literal["auto"] | Annotated[int, Field(ge=1, le=_MOST)], BeforeValidator(_checked)]
"""Threads that compute a pass: a number, or `auto`, as many as a measurement finds best."""


def cpu_limit(cgroup: Path = CGROUP) -> float:
    """Number of cores that this process may use: the lower of its affinity and its container's quota."""
    available = float(len(os.sched_getaffinity(0)))
    return min(available, _quota(cgroup) or available)


def most_threads(environment: Mapping[str, str] = os.environ) -> int:
    """The most compute threads that `auto` chooses: all cores but one, and no more than OMP_NUM_THREADS.

    Computing on all cores stalls once anything else runs, an event loop above all.
    """
    most = max(1, int(cpu_limit()) - 1)
    asked = environment.get("OMP_NUM_THREADS", "")
    return min(most, int(asked)) if asked.isdecimal() and int(asked) else most


def most_helped_threads() -> int:
    """The most threads of compiled passes that `auto` chooses: all cores; under a quota as in eager passes.

    Threads beyond the first compute on idle cores alone, which takes nothing from others. A quota is used up
    by any thread.
    """
    cores = len(os.sched_getaffinity(0))
    return cores if cpu_limit() == cores else most_threads()


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
