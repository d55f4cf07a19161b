"""Past outputs of a process killed at any moment open again as they were at some moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.in_time import in_time

ROOT = Path(__file__).parents[3]
KILLED = Path(__file__).with_name("killed.py")


def kills(folder: Path, count: int, seed: int) -> int:
    """Operations that outlived the kills."""
    command = [sys.executable, str(KILLED), str(folder), str(count), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_a_few_kills_leave_an_earlier_or_the_last_state(tmp_path: Path) -> None:
    kills(tmp_path, 10, 1)


@pytest.mark.slow
def test_two_hundred_kills_leave_an_earlier_or_the_last_state(tmp_path: Path) -> None:
    in_time(kills(tmp_path, 200, 1_000) > 1_000, "it was always killed before it had done much")
