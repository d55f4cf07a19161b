"""The simulated drafter runs small, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "drafter_sim.schema.json").read_text())


@pytest.mark.slow
def test_the_simulated_drafter_prints_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "drafter_sim", "--json"]
    command += ["--count", "1", "--tokens", "16", "--temperature", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    assert result["by_temperature"]["0"]["acceptance_length"] > 1.0
