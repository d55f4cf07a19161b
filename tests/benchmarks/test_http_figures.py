"""The HTTP benchmark runs small, end to end, and what it prints is what its schema says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.modules import benchmark_names, find_benchmark
from tests.in_time import in_time

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_http_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    small = ["--pairs", "4", "--tokens", "10", "--streams", "50", "--every-s", "0.5", "--idle-s", "1"]
    small += ["--relayed-streams", "4", "--relayed-tokens", "400", "--repeats", "2", "--drafter", ""]
    result = bench("http", *small)
    in_time(result["idle"]["http"]["core_share"] < 0.9, result["idle"])
    assert result["openai_scenarios"] is None


def test_a_benchmark_is_a_file_or_a_folder_that_python_runs() -> None:
    assert find_benchmark("offline") == BENCHMARKS / "offline.py"
    assert find_benchmark("http") == BENCHMARKS / "http" / "__main__.py"
    assert find_benchmark("gpu-step") == BENCHMARKS / "gpu_step.py"
    schemas = (BENCHMARKS.parent / "docs" / "figures").glob("*.schema.json")
    assert benchmark_names(BENCHMARKS) == sorted(path.name.removesuffix(".schema.json") for path in schemas)


@pytest.mark.slow
def test_the_page_is_weighed_and_painted_if_a_browser_is_there(
    bench: Callable[..., dict[str, Any]],
) -> None:
    result = bench("page", "--repeats", "1")
    file = Path(__file__).parents[2] / "orchestrator/front/http/page/page.html"
    assert result["bytes"] == file.stat().st_size
    if result["chromium"] is not None:
        reached = result["milliseconds_to"]
        assert reached["first_paint"] <= reached["first_contentful_paint"]
        assert result["requests"] <= 6


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--repeats", "0", "give 1 or more"),
        ("--repeats", "-3", "give 1 or more"),
        ("--target", "/nonexistent", "there is no tokenizer.json"),
        ("--chromium", "/nonexistent", "there is no program at this path"),
    ],
)
def test_a_wrong_flag_of_the_page_is_named_in_one_line(flag: str, value: str, says: str) -> None:
    last = stderr_of("page", "--json", f"{flag}={value}").splitlines()[-1]
    assert last.startswith(f"outrider bench page: error: {flag} {value}: ")
    assert says in last


def test_a_program_that_is_no_chromium_is_named_in_one_line() -> None:
    pytest.importorskip("playwright")
    said = stderr_of("page", "--json", "--chromium", sys.executable)
    assert f"--chromium {sys.executable}: it did not start as a Chromium" in said
    assert "Traceback" not in said


def stderr_of(name: str, *flags: str) -> str:
    command = [sys.executable, "-m", "outrider.cli", "bench", name, *flags]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert done.stdout == ""
    return done.stderr
