"""The offline benchmark runs small, end to end, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "offline.schema.json").read_text())


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    command = [sys.executable, "-m", "outrider.cli", "bench", "offline", "--json"]
    command += ["--prompts", "1", "--tokens", "8", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parsed


@pytest.mark.slow
def test_the_offline_benchmark_prints_what_its_schema_says(result: dict[str, Any]) -> None:
    jsonschema.validate(result, SCHEMA)


@pytest.mark.slow
def test_the_offline_benchmark_finds_the_ids_identical(result: dict[str, Any]) -> None:
    assert result["identical"] is True
    assert result["sampled"]["identical"] is True


def test_the_schema_refuses_a_field_that_nobody_described() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "offline", "surprise": 1}, SCHEMA)
