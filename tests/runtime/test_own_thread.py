"""A job in a thread of its own leaves neither the thread nor the job's compute threads."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider.runtime.own_thread import in_own_thread


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
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(20.0)
        ended.set()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await in_own_thread(work)
        assert not ended.is_set()

    try:
        asyncio.run(run())
    finally:
        go_on.set()


LEAVES_NO_TEAM = """
import asyncio, os, time
import torch
from outrider.runtime.own_thread import in_own_thread

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
