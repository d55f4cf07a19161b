"""The first run on a GPU, tried on the CPU, without the packages that a GPU machine may lack."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_first.__main__ import STAGES
from benchmarks.gpu_first.report import Part, Report, Results, predictions, results

ROOT = Path(__file__).parents[2]
LACKING = ("pydantic", "pydantic_settings", "llguidance", "grpc_health", "grpc_reflection", "grpc", "redis")
WITHOUT = f"""
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKING}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)


sys.meta_path.insert(0, Missing())
"""


def test_every_prediction_names_a_stage_and_a_range() -> None:
    for key, found in predictions().items():
        stage, name, field = key.split(".")
        assert stage in STAGES
        assert name
        assert field
        assert found["low"] < found["high"]
        assert found["why"]


def test_results_are_lines_beside_what_was_predicted_of_them(tmp_path: Path) -> None:
    report = Report(tmp_path, "probe")
    report.add("graph_nodes", {"us_per_node": 1.2})
    report.add("graph_nodes", {"us_per_node": 9.0, "other": 1})
    report.add("versions", {"torch": "2"})

    good, bad, plain = results(tmp_path)
    assert good == {
        "stage": "probe", "name": "graph_nodes", "us_per_node": 1.2,
        "predicted": {"us_per_node": [0.9, 1.5]}, "missed": [],
    }  # fmt: skip
    assert bad["missed"] == ["us_per_node"]
    assert plain == {"stage": "probe", "name": "versions", "torch": "2"}


def test_a_part_that_fails_is_a_line_and_the_next_part_runs(tmp_path: Path) -> None:
    def broken() -> Results:
        yield "first", {"value": 1}
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def whole() -> Results:
        yield "second", {"value": 2}

    parts: dict[str, Part] = {"broken": broken, "whole": whole}
    failed = Report(tmp_path, "kernel").run(parts, 10)

    assert failed == 1
    lines = results(tmp_path)
    assert [line["name"] for line in lines] == ["first", "broken", "broken_took", "second", "whole_took"]
    assert "illegal memory access" in lines[1]["error"]


def test_parts_for_which_there_is_no_time_are_named(tmp_path: Path) -> None:
    Report(tmp_path, "load").run({"late": lambda: iter(())}, seconds=-1)

    (line,) = results(tmp_path)
    assert line["name"] == "late"
    assert "over" in line["skipped"]


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_all_stages_run_small_on_the_cpu_without_the_services_packages(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    command = [sys.executable, "-m", "benchmarks.gpu_first", "--out", str(out), "--device", "cpu", "--tiny"]
    command += ["--seconds", "100"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    lines: list[dict[str, Any]] = results(out)
    assert [line for line in lines if "error" in line] == [], ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [line["stage"] for line in lines if line["name"] == "stage"] == list(STAGES)
    assert json.loads((out / "predictions.json").read_text()) == predictions()
    by_name = {line["name"]: line for line in lines}
    assert by_name["cases"]["wrong"] == []
    assert by_name["check"]["static_worst"] < 0.15
    assert {
        "versions",
        "products_1",
        "step_1x4",
        "kernels_1",
        "captures",
        "beside_a_prompt",
    } <= by_name.keys()
