"""The benchmark of the packed pass, run small."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = REPOSITORY / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("packed_step", folder / "packed_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_last_line_is_what_the_schema_says(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["packed_step", "--json", "--repeats", "1", "--layers", "1"])

    benchmark.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    schema = json.loads((REPOSITORY / "docs/figures/packed_step.schema.json").read_text())
    assert set(found) == set(schema["properties"]) == set(schema["required"])
    assert found["name"] == schema["properties"]["name"]["const"]
    assert set(schema["properties"]["ms"]["required"]) <= set(found["ms"])
    assert all(spent > 0 for spent in found["ms"].values())
