"""The chaos benchmark runs small, end to end, as its schema says; and nothing that it starts outlives it."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.in_time import in_time
from tests.integration.live import until
from tests.ranks import children_of, is_running

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


@pytest.mark.long
@pytest.mark.timeout(630)
def test_a_short_run_harms_many_and_no_stream_notices() -> None:
    with bench("--check", *SMALL) as running:
        out, errors = running.communicate(timeout=600)
    assert running.returncode == 0, errors
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    assert result["identical"] == result["streams"]
    assert (result["duplicates"], result["gaps"], result["failed"]) == (0, 0, 0)
    in_time(result["streams"] >= 8, result)
    in_time(result["faults"] >= 3, result)


@pytest.mark.slow
@pytest.mark.timeout(630)
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)],
)
def test_nothing_outlives_it(number: signal.Signals, status: int) -> None:
    with bench("--seconds", "300", "--every", "0.5", "--streams", "2", "--tokens", "20") as running:
        assert running.stderr is not None
        harm = next((line for line in running.stderr if "freeze" in line or "slow" in line), "")
        before = children_of(running.pid)
        assert harm, "it ended before anything was held"
        assert len(before) > PROCESSES - 3
        running.send_signal(number)
        assert running.wait(60) == status
        until(lambda: not any(map(is_running, before)))
