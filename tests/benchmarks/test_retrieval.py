"""The retrieval benchmark runs small, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "retrieval.schema.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_the_retrieval_benchmark_prints_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "retrieval", "--json", "--tokens", "100000"]
    command += ["--insert-tokens", "20000", "--lookups", "50", "--prompts", "1", "--past", "100"]
    command += ["--new-tokens", "16", "--distractors", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    gained = result["acceptance_length_by"]
    assert gained["past_100"] > gained["past_0"]
    assert result["build"]["bytes_per_token"] < 9
