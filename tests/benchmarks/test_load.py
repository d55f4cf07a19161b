"""The load benchmark runs small, end to end, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "load.schema.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_the_load_benchmark_prints_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "load", "--json", "--concurrency", "1,2"]
    command += ["--tokens", "8", "--repeats", "1", "--long-prompt", "200"]
    command += ["--history", "100", "--prompts", "1", "--untimed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    assert result["identical"] is True
