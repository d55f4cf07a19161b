"""The attention kernels, compiled without a GPU for every architecture, dtype, width and tile that serves."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.slow,
]

ROOT = Path(__file__).parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Largest shared memory of a block, in bytes, by architecture."""


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("architecture", SHARED)
def test_every_variant_fits_its_gpu_and_uses_its_matrix_units(architecture: int, tmp_path: Path) -> None:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.gpu.compile_kernels", str(architecture)]
    if "GPU_PROOF" not in os.environ:
        command.append("--few")
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=3900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert found

    assert [variant for variant in found if not fits(variant, architecture)] == []
    for each in found:
        if each["spilled"]:
            print("spills", json.dumps(each))
    half = [each for each in found if each["kernel"] == "_attend_item" and each["dtype"] != "fp32"]
    assert all(each["mma"] or each["wgmma"] for each in half)
    if architecture in (90, 100):
        assert all(each["wgmma"] for each in half if each["side"] >= 64)


def fits(variant: dict[str, Any], architecture: int) -> bool:
    half = variant["dtype"] != "fp32"
    even = variant["width"] in (None, 64, 128)
    spills = variant["spilled"] and half and even and architecture == 90
    return variant["shared"] <= SHARED[architecture] and not spills and not variant["tf32"]
