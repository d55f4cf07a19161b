"""The processes that a benchmark measures: `outrider up`, a peer, and helpers around them.

Starts, pauses and reads processes; knows nothing of the requests that they get.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.shared.envelope import REPOSITORY, module_command
from benchmarks.shared.process_memory import peak_mb

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
STOP_S = 15.0
"""Seconds that a process gets to end once it was asked to."""


class UpServices:
    """A running `outrider up`: a verifier, at most one drafter, an orchestrator, each a process."""

    def __init__(
        self,
        target: str,
        drafter: str,
        *,
        threads: int = 1,
        passes: str = "eager",
        corpora: Sequence[Path] = (),
        **variables: str,
    ) -> None:
        """Starts the services with `variables` in their environment and returns when they are ready.

        Args:
            passes: how models compute their passes, as `outrider up --passes` says.
            corpora: folders of corpora to draft from; without any there is no retrieval worker.
        """
        command = [sys.executable, "-m", "outrider.cli", "up", "--json", "--threads", str(threads)]
        command += ["--target", target, "--drafter", drafter]
        # Benchmarks repeat requests, and past outputs would remember them.
        command += [f"--corpus={corpus}" for corpus in corpora] or ["--retrieval", "none"]
        command += ["--passes", passes, "--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"]
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
        self._process.wait(STOP_S)

    def pids(self, *roles: str) -> list[int]:
        """Process ids of these roles; of all processes where no role is named."""
        return [p["pid"] for p in self.processes if not roles or p["role"] in roles]

    def address_of(self, role: str) -> str:
        """host:port of the only process of this role."""
        address: str = next(p["address"] for p in self.processes if p["role"] == role)
        return address

    def peak_mb(self) -> dict[str, int]:
        """Largest resident size of each process so far, in MiB, by role."""
        return {p["role"]: peak_mb(p["pid"]) for p in self.processes}

    def metric(self, role: str, name: str, **labels: str) -> float:
        """The first sample with this name and labels in a process's /metrics. Raises KeyError without any."""
        for value in self._samples(role, name, labels):
            return value
        raise KeyError(f"{name}{labels} is not among the metrics of {role}")

    def metric_sum(self, role: str, name: str, **labels: str) -> float:
        """The sum of all samples with this name and these labels in a process's /metrics; 0 without any."""
        return sum(self._samples(role, name, labels))

    def _samples(self, role: str, name: str, labels: dict[str, str]) -> Iterator[float]:
        yield from samples(next(p["metrics"] for p in self.processes if p["role"] == role), name, labels)


def samples(address: str, name: str, labels: Mapping[str, str]) -> Iterator[float]:
    """The samples with this name and these labels among the metrics at host:port."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) and found[1] == name:
            have = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
            if labels.items() <= have.items():
                yield float(found[3])


class HfPeer:
    """A process that decodes with transformers; see hf_peer.py."""

    def __init__(self, target: str, drafter: str | None, *, ignore_eos: bool = False) -> None:
        command = module_command("shared.hf_peer", target, *([drafter] if drafter else []))
        command += ["--ignore-eos"] if ignore_eos else []
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=environment,
        )
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STOP_S)

    @property
    def pid(self) -> int:
        """The peer's process id."""
        return self._process.pid

    def decode(self, *, ids: list[int], **request: Any) -> tuple[tuple[int, ...], float]:
        """Generated ids of one request, and the seconds that `generate` took."""
        (made,), seconds = self.decode_batch(batch=[ids], **request)
        return made, seconds

    def decode_batch(self, **request: Any) -> tuple[list[tuple[int, ...]], float]:
        """Generated ids of each prompt in the request's `batch`, and the seconds that `generate` took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        return [tuple(ids) for ids in answer["ids"]], answer["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer process ended; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class HelperProcess:
    """A process whose first line is its address, alone or in a JSON object, and which ends with its stdin."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{' '.join(command)} did not start; its message is above")
        self.ready: dict[str, Any] = json.loads(line) if line.startswith("{") else {"address": line}
        self.address: str = self.ready["address"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait(STOP_S)
        self.process.stdout.close()


def faulty_drafter(drafter: str, fault: str) -> HelperProcess:
    """A process between a verifier and the drafter at this address; see faulty_drafter.py."""
    return HelperProcess(module_command("shared.faulty_drafter", drafter, fault))


def orchestrator(verifier: str, *flags: str) -> HelperProcess:
    """One more orchestrator in front of the verifier at this address, with these flags."""
    return HelperProcess([sys.executable, "-m", "orchestrator", "--verifier", verifier, *flags])


@contextlib.contextmanager
def paused(pids: list[int]) -> Iterator[None]:
    """Holds these processes with SIGSTOP inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
