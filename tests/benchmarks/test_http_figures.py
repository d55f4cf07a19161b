"""The HTTP benchmark runs small, end to end, and what it prints is what its schema says."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from outrider.cli.modules import benchmark_names, find_benchmark

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "figures" / "http.schema.json").read_text())


@pytest.mark.slow
def test_the_http_benchmark_prints_what_its_schema_says() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "http", "--json", "--pairs", "4"]
    command += ["--tokens", "10", "--streams", "50", "--every-s", "0.5", "--idle-s", "1", "--drafter", ""]
    command += ["--relayed-streams", "4", "--relayed-tokens", "400", "--repeats", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(result, SCHEMA)
    assert result["idle"]["http"]["core_share"] < 0.9
    assert result["openai_scenarios"] is None


def test_a_benchmark_may_be_called_as_a_module_of_the_standard_library() -> None:
    assert find_benchmark("http").name == "http_.py"
    assert {"http", "offline"} <= set(benchmark_names(ROOT / "benchmarks"))
