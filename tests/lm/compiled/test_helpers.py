"""Threads that help with a pass: they change no bit, and a thread that computes never depends on them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.compiling.toolchain import processor_flags
from outrider.lm.weight_only.kernel import WeightOnlyKernel, load_kernel
from outrider.lm.weight_only.packing import PackedWeight

pytestmark = pytest.mark.skipif(
    "avx512f" not in processor_flags().split(), reason="the kernel that is called here takes AVX-512"
)
INPUTS = 96


@pytest.fixture(scope="module")
def kernel() -> WeightOnlyKernel:
    return load_kernel("weight_dtype", None)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(kernel: WeightOnlyKernel) -> list[PackedWeight]:
    """Few panels, some, and so many that pieces have several."""
    return [
        PackedWeight.of(torch.randn(outputs, INPUTS), "bfloat16", kernel.width)
        for outputs in (200, 900, 5000)
    ]


def helpers() -> list[int]:
    """The ids of this process's helper threads."""
    return [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "outrider-helper"
    ]


def test_helpers_change_no_bit(kernel: WeightOnlyKernel) -> None:
    given = [(rows, weight) for rows in torch.randn(40, 11, INPUTS) for weight in weights(kernel)]
    torch.set_num_threads(1)
    alone = [kernel.multiply(rows, weight, None) for rows, weight in given]
    for threads in (2, 5):
        torch.set_num_threads(threads)
        for _ in range(10):
            for (rows, weight), expected in zip(given, alone, strict=True):
                assert torch.equal(kernel.multiply(rows, weight, None), expected)


def test_several_threads_compute_at_once_each_with_its_own_result(kernel: WeightOnlyKernel) -> None:
    weight = weights(kernel)[2]
    given = list(torch.randn(8, 11, INPUTS))
    torch.set_num_threads(1)
    alone = [kernel.multiply(rows, weight, None) for rows in given]
    torch.set_num_threads(2)

    def compute(which: int) -> bool:
        return all(torch.equal(kernel.multiply(given[which], weight, None), alone[which]) for _ in range(100))

    with ThreadPoolExecutor(len(given)) as pool:
        assert all(pool.map(compute, range(len(given))))


def test_helpers_run_only_where_a_core_is_idle(kernel: WeightOnlyKernel) -> None:
    torch.set_num_threads(3)
    kernel.multiply(torch.randn(1, INPUTS), weights(kernel)[2], None)
    deadline = time.monotonic() + 30
    while len(found := helpers()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # a helper that has yet to begin has no name, and waits for an idle core
    assert len(found) >= 2
    assert {os.sched_getscheduler(thread) for thread in found} == {os.SCHED_IDLE}


def test_a_forked_process_computes_without_the_threads_of_its_parent() -> None:
    program = """
import os, signal, torch
from outrider.lm.weight_only.kernel import load_kernel
from outrider.lm.weight_only.packing import PackedWeight
kernel = load_kernel("weight_dtype", None)
torch.set_num_threads(2)
weight, rows = PackedWeight.of(torch.ones(5000, 96), "bfloat16", kernel.width), torch.ones(11, 96)
expected = kernel.multiply(rows, weight, None)
if (child := os.fork()) == 0:
    signal.alarm(20)
    made = [kernel.multiply(rows, weight, None).numpy() for _ in range(100)]  # torch's own threads are gone
    has_helper = len(os.listdir("/proc/self/task")) == 2
    os._exit(0 if has_helper and all((one == expected.numpy()).all() for one in made) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
