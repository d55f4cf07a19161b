"""What every benchmark's last line has in common: one JSON object that says what ran, where and how.

Knows nothing about what is measured.
"""

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The checkout's commit, with `+` where tracked files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in MiB, Python."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "python": platform.python_version(),
    }


def print_result(name: str, settings: dict[str, Any], started: float, fields: dict[str, Any]) -> None:
    """Print the envelope as the last line of stdout. `started` is a time.perf_counter() reading."""
    envelope = {
        "name": name,
        "commit": commit(),
        "machine": machine(),
        "settings": settings,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(envelope | fields), flush=True)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
