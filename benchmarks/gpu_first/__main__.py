"""The first ten minutes on a GPU that nobody has tried: five stages, each a process of its own.

Run as `python3 -m benchmarks.gpu_first --out DIR` in a checkout, with torch, transformers and numpy alone
(pytest for the tests of the stage `load`). Every result is one line of JSON, in DIR/results.jsonl and on
stdout, as soon as it is known. `predictions.json` beside this file says what is expected and why; what
misses its prediction is where to look. `--device cpu --tiny` tries the program without a GPU.

An error that spoils a CUDA context ends one stage alone. A stage that takes too long is killed, and its
lines stay.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_first.report import PREDICTIONS, Report, results

STAGES = {"probe": 40, "eight": 160, "load": 150, "ragged": 40, "kernel": 170}
"""Seconds that each stage may take."""
_GRACE_S = 10
"""Seconds after which a stage that goes on is killed."""


def arguments() -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu_first", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for results")
    parser.add_argument("--stage", choices=STAGES, help="run one stage in this process")
    parser.add_argument("--part", help="run one part of the stage alone")
    parser.add_argument("--seconds", type=float, help="seconds of each stage (default: 40 to 170 by stage)")
    parser.add_argument("--device", default="cuda", help="the torch device (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few repeats, to try the program")
    return parser.parse_args()


def run_stage(settings: argparse.Namespace) -> int:
    """Runs one stage in this process; returns 1 where a part of it failed."""
    from benchmarks.gpu_first.machine import Machine

    machine = Machine(settings.device, settings.tiny, settings.out)
    parts = import_module(f"benchmarks.gpu_first.{settings.stage}").parts(machine)
    if settings.part is not None:
        parts = {settings.part: parts[settings.part]}
    seconds = settings.seconds or STAGES[settings.stage]
    compares = settings.device.startswith("cuda") and not settings.tiny
    return 1 if Report(settings.out, settings.stage, compares).run(parts, seconds) else 0


def start_stage(settings: argparse.Namespace, stage: str) -> str | None:
    """Runs one stage as a process of its own; returns what went wrong, or None."""
    seconds = settings.seconds or STAGES[stage]
    command = [sys.executable, "-m", "benchmarks.gpu_first", "--stage", stage, "--out", str(settings.out)]
    command += ["--seconds", str(seconds), "--device", settings.device, *["--tiny"] * settings.tiny]
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    own = {name: str(settings.out / folder) for name, folder in caches.items()}
    # Kernels run on the GPU where there is one; elsewhere they have to be interpreted.
    own["TRITON_INTERPRET"] = "0" if settings.device.startswith("cuda") else "1"
    child = subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True)
    try:
        status = child.wait(seconds + _GRACE_S)
    except subprocess.TimeoutExpired:
        # Its own children too, a sanitizer or pytest.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"killed after {seconds + _GRACE_S:.0f} s"
    return None if not status else f"ended with status {status}"


def main() -> int:
    """Runs all stages, or the one named; returns 1 where something failed."""
    settings = arguments()
    settings.out = settings.out.resolve()
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.stage is not None:
        return run_stage(settings)
    shutil.copy(PREDICTIONS, settings.out)
    failed = False
    for stage in STAGES:
        began = time.monotonic()
        wrong = start_stage(settings, stage)
        failed |= wrong is not None
        fields = {"seconds": round(time.monotonic() - began, 1)} | ({"error": wrong} if wrong else {})
        Report(settings.out, stage).add("stage", fields)
    for line in results(settings.out):
        for field in line.get("missed", ()):
            low, high = line["predicted"][field]
            print(
                f"{line['stage']}.{line['name']}.{field}: {line[field]}, predicted {low} to {high}",
                file=sys.stderr,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
