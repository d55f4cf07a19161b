"""The GPU benchmark, run small on the CPU: the same code, and what it prints is what its schema says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_step import Roofline
from benchmarks.shared.random_llama import EIGHT_BILLION

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_on_the_cpu_and_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("gpu-step", "--device", "cpu", "--tiny", "--repeats", "1", "--prompts", "2")

    assert result["exactness"]["float32"]["identical"] is True
    assert [(row["batch"], row["tree"]) for row in result["steps"]] == [(1, 0), (1, 4), (2, 0), (2, 4)]


def test_the_floor_is_that_of_bytes_for_few_rows_and_that_of_arithmetic_for_many() -> None:
    roofline = Roofline(EIGHT_BILLION, 2, 4.3e12, 790e12)

    assert roofline.multiplied == pytest.approx(7.5e9, rel=0.01)
    one = roofline.floor([1024], [1])
    assert (one.bound, one.ms) == ("bytes", pytest.approx(3.52, abs=0.03))
    some, many = roofline.floor([1024] * 8, [33] * 8), roofline.floor([1024] * 32, [65] * 32)
    assert (some.bound, some.ms) == ("arithmetic", pytest.approx(5.2, abs=0.3))
    assert (many.bound, many.ms) == ("arithmetic", pytest.approx(41, abs=2))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_cuda_device_it_says_so_and_fails() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "gpu-step", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)

    assert done.returncode == 1
    assert done.stderr.startswith("gpu-step: there is no CUDA device here; --device cpu --tiny tries")
    assert done.stdout == ""
