"""The sessions benchmark runs small, end to end, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "sessions.schema.json").read_text())


@pytest.mark.slow
def test_the_sessions_benchmark_prints_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "sessions", "--json"]
    command += ["--opened", "40", "--parked", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    assert result["parked_ids"] > 32
