"""The benchmark of the deterministic profile runs small, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "determinism.schema.json").read_text())


@pytest.mark.slow
def test_the_determinism_benchmark_prints_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "determinism", "--json", "--repeats", "1"]
    command += ["--tokens", "512", "--alone", "256", "--alone-with", "256"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    for pairs in result["with_profile"].values():
        assert [pair["rows_with_other_bits"] for pair in pairs.values()] == [0, 0]
    for pairs in result["without_profile"].values():
        assert all(pair["rows_with_other_bits"] > 0 for pair in pairs.values())
