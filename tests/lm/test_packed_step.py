"""The benchmark of the packed pass, run small."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import packed_step

REPOSITORY = Path(__file__).parents[2]


def test_its_last_line_is_what_the_schema_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["packed_step", "--json", "--repeats", "1", "--layers", "1"])

    packed_step.main()

    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    schema = json.loads((REPOSITORY / "docs/figures/packed_step.schema.json").read_text())
    assert set(found) == set(schema["properties"]) == set(schema["required"])
    assert found["name"] == schema["properties"]["name"]["const"]
    assert set(schema["properties"]["ms"]["required"]) <= set(found["ms"])
    assert set(found["over_floor"]) == set(found["ms"])
    assert set(schema["properties"]["floor"]["required"]) == set(found["floor"])
    assert set(found["kernels"]) == {"512x256", "256x256", "1376x256", "256x688", "4096x256"}
    for name in ("small_ms", "pass_overhead_ms"):
        assert set(schema["properties"][name]["required"]) == set(found[name])
    assert all(spent > 0 for spent in [*found["ms"].values(), *found["small_ms"].values()])
    assert all(spent > 0 for spent in found["pass_overhead_ms"].values())
