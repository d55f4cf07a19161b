"""The chaos benchmark runs small, end to end, as its schema says; and nothing that it starts outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "chaos.schema.json").read_text())
SMALL = ["--seconds", "25", "--every", "3", "--streams", "8", "--tokens", "40", "--prompt", "60"]
PROCESSES = 8


def bench(*flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "outrider.cli", "bench", "chaos", "--json", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_a_short_run_harms_many_and_no_stream_notices() -> None:
    with bench("--check", *SMALL) as running:
        out, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    assert result["identical"] == result["streams"] >= 8
    assert (result["duplicates"], result["gaps"], result["failed"]) == (0, 0, 0)
    assert result["faults"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(630)
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)],
)
def test_nothing_outlives_it(number: signal.Signals, status: int) -> None:
    with bench("--seconds", "300", "--every", "0.5", "--streams", "2", "--tokens", "20") as running:
        assert running.stderr is not None
        told = next((line for line in running.stderr if "freeze" in line or "slow" in line), "")
        before = children(running.pid)
        assert told, "it ended before anything was held"
        assert len(before) > PROCESSES - 3
        running.send_signal(number)
        assert running.wait(60) == status
        until(lambda: not any(map(alive, before)))


def children(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found |= {int(child) for child in task.read_text().split()}
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(happened: Callable[[], Any], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)
