"""The GPU benchmark, run small on the CPU: the same code, and what it prints is what its schema says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_on_the_cpu_and_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("gpu-step", "--device", "cpu", "--tiny", "--repeats", "1", "--prompts", "2")

    assert result["exactness"]["float32"]["identical"] is True
    assert [(row["batch"], row["tree"]) for row in result["steps"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_cuda_device_it_says_so_and_fails() -> None:
    command = [sys.executable, "-m", "outrider.cli", "bench", "gpu-step", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)

    assert done.returncode == 1
    assert done.stderr.startswith("gpu-step: there is no CUDA device here; --device cpu --tiny tries")
    assert done.stdout == ""
