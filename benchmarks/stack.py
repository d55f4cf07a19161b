"""The processes a benchmark measures: `outrider up` and a peer, with what their metrics and memory say.

Knows how to start, pause and read them; knows nothing of what they are asked.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from envelope import REPOSITORY

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")


class Stack:
    """A running `outrider up`: one verifier, at most one drafter, one orchestrator, each a process."""

    def __init__(self, target: str, drafter: str, **variables: str) -> None:
        """`variables` are added to the environment of its processes."""
        command = [sys.executable, "-m", "outrider.cli", "up", "--json", "--threads", "1"]
        # Requests are repeated here, which past outputs would remember.
        command += ["--target", target, "--drafter", drafter, "--retrieval", "none"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=os.environ | variables
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line or "error" in json.loads(line):
            raise SystemExit(f"the services did not start: {line.strip() or 'see above'}")
        ready = json.loads(line)
        self.address: str = ready["address"]
        self.http: str = ready["http"]
        self.processes: list[dict[str, Any]] = ready["processes"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(15)

    def pids(self, *roles: str) -> list[int]:
        """Process ids of these roles; of all where none is named."""
        return [p["pid"] for p in self.processes if not roles or p["role"] in roles]

    def address_of(self, role: str) -> str:
        """host:port of the one process of this role."""
        address: str = next(p["address"] for p in self.processes if p["role"] == role)
        return address

    def peak_mb(self) -> dict[str, int]:
        """The largest resident size of each process so far, in MiB."""
        return {p["role"]: peak_mb(p["pid"]) for p in self.processes}

    def metric(self, role: str, name: str, **labels: str) -> float:
        """One sample of a process's /metrics. Raises KeyError where it is not there."""
        address = next(p["metrics"] for p in self.processes if p["role"] == role)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        for line in text.splitlines():
            if (found := _SAMPLE.match(line)) and found[1] == name:
                have = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if labels.items() <= have.items():
                    return float(found[3])
        raise KeyError(f"{name}{labels} is not among the metrics of {role}")


class Peer:
    """The library's own decoding in a process of its own; see peer.py."""

    def __init__(self, target: str, drafter: str | None) -> None:
        command = [sys.executable, str(Path(__file__).parent / "peer.py"), target] + (
            [drafter] if drafter else []
        )
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(15)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def decode(self, **request: Any) -> tuple[tuple[int, ...], float]:
        """Generated ids and seconds of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return tuple(answer["ids"]), answer["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer process ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Helper:
    """A process that says its address in its first line and ends with its stdin."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{' '.join(command)} did not start; its message is above")
        self.address: str = json.loads(line)["address"] if line.startswith("{") else line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait(15)


class FaultyDrafter(Helper):
    """Between a verifier and a real drafter; see faulty.py."""

    def __init__(self, drafter: str, mode: str) -> None:
        super().__init__([sys.executable, str(Path(__file__).parent / "faulty.py"), drafter, mode])


class Orchestrator(Helper):
    """One more orchestrator of a verifier, with a drafter of its own choice."""

    def __init__(self, verifier: str, drafter: str) -> None:
        command = [sys.executable, "-m", "orchestrator", "--verifier", verifier, "--drafter", drafter]
        super().__init__(command)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Hold these processes with SIGSTOP meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def peak_mb(pid: int) -> int:
    """VmHWM of a process, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    raise KeyError(f"/proc/{pid}/status has no VmHWM")
