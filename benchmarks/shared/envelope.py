"""The command line and the last line of output that all benchmarks share.

The last line is one JSON object that names what ran, where and how. Knows nothing about what is measured.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.plots.curves import chart_of
from benchmarks.plots.draw import draw, svg_path

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "models"
ALWAYS_JSON = "accepted for symmetry; the last line is always JSON"


def command_line(
    name: str, description: str | None, json_help: str = ALWAYS_JSON, *, is_curve: bool = False
) -> argparse.ArgumentParser:
    """A parser for `outrider bench NAME` with the --json flag, which every benchmark accepts.

    Args:
        is_curve: whether the benchmark's result can be drawn, and the parser has the --plot flag.
    """
    parser = argparse.ArgumentParser(prog=f"outrider bench {name}", description=description)
    parser.add_argument("--json", action="store_true", help=json_help)
    if is_curve:
        parser.add_argument(
            "--plot", type=svg_path, metavar="FILE.svg", help="draw the result too; needs the extra [plot]"
        )
    return parser


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Adds --target and --drafter, whose defaults are the embedded pair."""
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--drafter", default=str(MODELS / "drafter"), help="folder of the drafter")


def settings_of(flags: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """The flags' values by name for the envelope, without --json, --plot and the names in `left_out`."""
    return {key: value for key, value in vars(flags).items() if key not in ("json", "plot", *left_out)}


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs the module benchmarks.MODULE as a process of its own, from REPOSITORY."""
    return [sys.executable, "-m", f"benchmarks.{module}", *arguments]


def commit() -> str:
    """The checkout's commit, with `+` where tracked files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """This machine's processor, usable cores, memory in MiB and Python version."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "python": platform.python_version(),
    }


def print_result(
    name: str, settings: dict[str, Any], started: float, fields: dict[str, Any], plot: Path | None = None
) -> None:
    """Prints the envelope and a benchmark's fields as the last line of stdout.

    Args:
        started: the time.perf_counter() reading at which the benchmark began.
        plot: the SVG file that the result is drawn to; None: no file.
    """
    envelope = {
        "name": name,
        "commit": commit(),
        "machine": machine(),
        "settings": settings,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(envelope | fields), flush=True)
    if plot is not None:
        draw(chart_of(envelope | fields), plot)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
