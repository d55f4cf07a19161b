"""The process of a lesson without a model: each version is better than the one before.

The order's target says how the lesson ends: `memory`, `late`, `failed`, or with weights. A `failed` one says
how large a core of the process may be, and when the kernel runs the process.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

from outrider.learning.child_process import keep, run, split
from outrider.learning.order import LessonOrder
from outrider.learning.passages import from_bytes


def carry_out(order: LessonOrder, data: bytes) -> dict[str, Any]:
    """Version n has 4 (n + 1) places of each passage right."""
    _, exams = map(from_bytes, split(data))
    if order.target == "memory":
        raise MemoryError
    if order.target == "failed":
        cores, policy = resource.getrlimit(resource.RLIMIT_CORE), os.sched_getscheduler(0)
        raise RuntimeError(f"cores {cores}, idle {policy == os.SCHED_IDLE}")
    while order.target == "late":
        pass
    keep(Path(order.out), _write)
    versions = (*order.others, order.version, order.candidate)
    return {"losses": [], "accepted": {version: [4 * (version + 1)] * len(exams) for version in versions}}


def _write(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").touch()


if __name__ == "__main__":
    sys.exit(run(carry_out))
