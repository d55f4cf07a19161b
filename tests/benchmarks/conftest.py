"""Runs benchmarks small, as users run them, and holds their last lines to the schemas in docs/figures."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def schema_of() -> Bench:
    """The schema of a benchmark's last line, by the benchmark's name."""

    def read(name: str) -> dict[str, Any]:
        path = ROOT / "docs" / "figures" / f"{name.replace('-', '_')}.schema.json"
        schema: dict[str, Any] = json.loads(path.read_text())
        return schema

    return read


@pytest.fixture(scope="session")
def bench(schema_of: Bench) -> Bench:
    """Runs `outrider bench NAME --json FLAG...` and returns its last line, checked against the schema."""

    def run(name: str, *flags: str, timeout_s: float = 280, status: int = 0) -> dict[str, Any]:
        command = [sys.executable, "-m", "outrider.cli", "bench", name, "--json", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == status, done.stderr + done.stdout[-4000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        jsonschema.validate(result, schema_of(name))
        return result

    return run
