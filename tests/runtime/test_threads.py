"""Compute threads leave a core to everything else, within the container's limit."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.runtime.threads import cpu_limit, in_own_thread, most_threads


@pytest.mark.parametrize(
    ("name", "text", "cores"),
    [
        ("cpu.max", "50000 100000", 0.5),
        ("cpu.max", "max 100000", None),
        ("cpu.max", "nonsense", None),
        ("none", "", None),
    ],
)
def test_the_limit_is_the_quota_or_the_affinity(
    tmp_path: Path, name: str, text: str, cores: float | None
) -> None:
    (tmp_path / name).write_text(text)
    assert cpu_limit(tmp_path) == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("quota", "cores"), [("50000", 0.5), ("-1", None)])
def test_the_first_version_of_control_groups_is_read_too(
    tmp_path: Path, quota: str, cores: float | None
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert cpu_limit(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_a_core_is_left_to_others_but_one_thread_always_computes() -> None:
    assert most_threads({}) == max(1, int(cpu_limit()) - 1)


@pytest.mark.parametrize(("asked", "most"), [("1", 1), ("2", 2), ("64", 7), ("0", 7), ("4,2", 7)])
def test_the_variable_of_openmp_bounds_the_threads(
    asked: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runtime.threads.cpu_limit", lambda: 8.0)
    assert most_threads({"OMP_NUM_THREADS": asked}) == most


def test_a_job_in_a_thread_of_its_own_hands_over_its_result_and_leaves_no_thread() -> None:
    async def run() -> tuple[threading.Thread, int]:
        thread = await in_own_thread(threading.current_thread)
        return thread, await in_own_thread(int, "12", base=3)

    thread, number = asyncio.run(run())
    thread.join(20.0)
    assert not thread.is_alive()
    assert thread is not threading.main_thread()
    assert number == 5


def test_an_error_of_a_job_in_a_thread_of_its_own_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(in_own_thread(int, "x"))


def test_who_gives_a_job_up_does_not_wait_for_its_end() -> None:
    go_on = threading.Event()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await in_own_thread(go_on.wait, 20.0)
        assert not go_on.is_set()

    try:
        asyncio.run(run())
    finally:
        go_on.set()


LEAVES_NO_TEAM = """
import asyncio, os, time
import torch
from outrider.runtime.threads import in_own_thread

def threads():
    return len(os.listdir("/proc/self/task"))

def job():
    torch.nn.functional.gelu(torch.randn(1000, 1000))
    return threads()

async def main():
    before = threads()
    during = await in_own_thread(job)
    print("team", during - before >= 4)
    for _ in range(1000):
        if threads() <= before:
            break
        await asyncio.sleep(0.01)
    print("gone", threads() <= before)

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_the_compute_threads_of_a_job_end_with_it() -> None:
    command = [sys.executable, "-c", LEAVES_NO_TEAM]
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert done.stdout.split("\n")[:2] == ["team True", "gone True"], done.stdout
