"""A running `outrider up` with what tests read of it: its first line, its children, their metrics."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

REQUEST: dict[str, Any] = {"ids": [5, 9, 30, 41], "max_tokens": 24, "temperature": 0.8, "seed": 11}


# Tests freeze the verifier for moments that a busy machine makes long. How an orchestrator gives a verifier
# up is tested where a clock can be set.
PATIENT = {"OUTRIDER_ORCHESTRATOR__SILENT_S": "20"}


def start_up(*flags: str, log: Path) -> "Up":
    """Starts `outrider up` and returns at once."""
    free = ("--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0")
    return _start("up", "--json", "--threads", "1", *free, *flags, log=log)


def start_demo(log: Path) -> "Up":
    """Starts `outrider demo`, which runs the same processes, and returns at once."""
    return _start("demo", log=log)


def _start(*arguments: str, log: Path) -> "Up":
    command = [sys.executable, "-W", "error", "-u", "-m", "outrider.cli", *arguments]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**PATIENT, **os.environ, "PYTHONPATH": str(ROOT)},
            process_group=0,
        )
    return Up(process, log)


class Up:
    """A running `outrider up`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        self.address = ""
        self.http = ""
        self.processes: list[dict[str, Any]] = []

    def wait_ready(self) -> None:
        ready = self.first_line()
        assert "error" not in ready, (ready, self.log())
        self.address, self.processes = ready["address"], ready["processes"]
        self.http = ready["http"]

    def first_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        announced: dict[str, Any] = json.loads(line)
        return announced

    def log(self) -> str:
        return self._log.read_text()

    def children(self) -> dict[str, int]:
        """Process ids of the children now, by role."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                words = (status.parent / "cmdline").read_bytes().split(b"\0")
            except (OSError, ValueError, IndexError):
                continue
            if parent == self.process.pid and b"-m" in words:
                module = words[words.index(b"-m") + 1].decode()
                found[module.removesuffix("_service")] = int(status.parent.name)
        return found

    def metric(self, role: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels in the process of a role."""
        return sample(next(it["metrics"] for it in self.processes if it["role"] == role), name, **labels)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(100)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def heed_interrupts() -> None:
    """Makes a child obey interrupts, which a shell's background jobs ignore: for `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Holds a process with SIGSTOP inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def sample(address: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels; `address` is where the process serves its metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=100) as reply:
        lines = reply.read().decode().splitlines()
    total = 0.0
    for line in lines:
        if (sample := re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)) and sample[1] == name:
            have = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
            total += float(sample[3]) if labels.items() <= have.items() else 0.0
    return total


def until(happened: Callable[[], Any], seconds: float = 100.0) -> None:
    """Returns once `happened` is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
