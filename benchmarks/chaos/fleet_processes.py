"""Starts the processes of a chaos run on addresses of their own, and kills, holds, slows and restarts them.

Knows nothing of plans and streams. All processes are tied to this process and end with it, however it ends.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from benchmarks.chaos.fault_plan import FleetProcess, Harm, ProcessFault
from benchmarks.shared.redis_process import RedisProcess, answers
from outrider.runtime.children import ROOT, ServiceProcess, reserved_address

ROLES = {"verifier": 2, "orchestrator": 2, "drafter": 2, "retrieval": 1, "redis": 1}
START_S = 180.0
STOP_S = 5.0
DRAIN_S = 30.0
"""Seconds in which a process that rolls has to drain; it is killed then."""
HELD_S, RUNNING_S = 0.08, 0.02
"""Seconds for which a slow process is held and let run, in turn."""
READY_TIMEOUT_S = 1.0
LEARNS = ("--learn", "public", "--learn-from", "*", "--learn-every", "64", "--learn-steps", "4")
"""Flags of a drafter that learns from all streams in short lessons, so that its weights change often."""
_PEER_UP = re.compile(r'^outrider_orchestrator_peer_up\{peer="([^"]+)"\} 1\.0$', re.MULTILINE)


class HarmedChild(Protocol):
    """A running process: a service or a Redis server."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait_ready(self, timeout_s: float) -> None: ...

    def terminate(self) -> None: ...

    def stop(self, grace_s: float) -> object: ...


class Checkouts:
    """The checkout from which each process runs.

    Args:
        code: the checkout of all processes at first.
        other: the checkout of another release; None: all releases are the same.
    """

    def __init__(self, code: Path, other: Path | None = None) -> None:
        self._code, self._other = code, other or code
        self._of: dict[FleetProcess, Path] = {}
        self.changed = 0
        """How often a process changed to the other release."""

    def of(self, process: FleetProcess) -> Path:
        """The checkout from which the process starts next."""
        return self._of.get(process, self._code)

    def use(self, process: FleetProcess, code: Path) -> None:
        """Sets the checkout from which the process starts next."""
        self._of[process] = code

    def change(self, process: FleetProcess) -> None:
        """Has a service start from the other release next; Redis has no release of ours."""
        if process.role != "redis" and self._other != self._code:
            self.use(process, self._other if self.of(process) == self._code else self._code)
            self.changed += 1


class ChaosFleet:
    """All processes of a chaos run: call `start`, then `harm` as often as wanted, and `close` in any case."""

    def __init__(
        self,
        target: str,
        drafter: str,
        *,
        log_level: str,
        deterministic: bool,
        code: Path = ROOT,
        devices: bool = True,
        heads: str = "",
        learns: bool = False,
        previous: Path | None = None,
    ) -> None:
        """Reserves the addresses; nothing runs yet.

        Args:
            deterministic: whether verifiers compute in the deterministic profile.
            code: the checkout whose services run at first.
            devices: whether orchestrators take the drafts of clients' devices.
            heads: the verifiers' heads, separated by commas; empty: none.
            learns: whether the drafters learn from the streams, each in a folder of its own.
            previous: the checkout of another release, to which a restarted service moves, and back with the
                next restart; None: all restarts stay with `code`.
        """
        self._held = contextlib.ExitStack()
        self._all = [FleetProcess(role, number) for role, count in ROLES.items() for number in range(count)]
        self.address = {process: self._held.enter_context(reserved_address()) for process in self._all}
        """The address of each process, the same throughout the run."""
        self._metrics = {process: self._held.enter_context(reserved_address()) for process in self._all}
        self._children: dict[FleetProcess, HarmedChild] = {}
        self._harmed: set[FleetProcess] = set()
        self._models = {"verifier": target, "drafter": drafter}
        self._log_level = log_level
        self._deterministic = deterministic
        self._checkouts = Checkouts(code, previous)
        self._devices = devices
        self._heads = heads
        scratch = tempfile.TemporaryDirectory(prefix="outrider-chaos-")
        self._learnt = Path(self._held.enter_context(scratch)) if learns else None

    @property
    def rolled(self) -> int:
        """Number of restarts that moved a service to the other release."""
        return self._checkouts.changed

    def learnt(self) -> dict[str, int]:
        """Lessons that the drafters began, and drafters whose latest weights are learnt ones."""
        states = [] if self._learnt is None else [*self._learnt.glob("*/state.json")]
        versions = [json.loads(state.read_text()) for state in states]
        return {
            "lessons": sum(it["last"] for it in versions),
            "drafters_changed": sum(it["current"] != 0 for it in versions),
        }

    def addresses(self, role: str) -> str:
        """Addresses of all processes of a role, separated by commas."""
        return ",".join(self.address[process] for process in self._all if process.role == role)

    async def start(self) -> None:
        """Starts all processes and returns when all are ready.

        Raises ServiceFailed, RuntimeError or TimeoutError where a process does not get ready.
        """
        for process in self._all:
            self._start(process)
        for process in self._all:
            await asyncio.to_thread(self._children[process].wait_ready, START_S)
        await self._until_ready(set(self._all))

    async def harm(self, fault: ProcessFault) -> None:
        """Carries a fault out and returns when its process is ready again. Raises what `start` raises."""
        process = fault.process
        self._harmed.add(process)
        pid = self._children[process].pid
        match fault.harm:
            case Harm.KILL | Harm.RESTART:
                os.kill(pid, signal.SIGKILL if fault.harm is Harm.KILL else signal.SIGTERM)
                if fault.harm is Harm.RESTART:
                    self._checkouts.change(process)
                await self._start_again(process, STOP_S, fault.lasts_s)
            case Harm.FREEZE:
                await _hold(pid, fault.lasts_s)
            case Harm.SLOW:
                ends = asyncio.get_running_loop().time() + fault.lasts_s
                while asyncio.get_running_loop().time() < ends:
                    await _hold(pid, HELD_S)
                    await asyncio.sleep(RUNNING_S)
        self._harmed.discard(process)
        await self._until_ready({process})

    async def roll(self, process: FleetProcess, code: Path) -> None:
        """Drains a process and starts it from another checkout; returns when it is ready.

        Raises what `start` raises.
        """
        self._harmed.add(process)
        self._checkouts.use(process, code)
        await self._start_again(process, DRAIN_S)
        self._harmed.discard(process)
        await self._until_ready({process})

    async def _start_again(self, process: FleetProcess, grace_s: float, after_s: float = 0.0) -> None:
        await asyncio.to_thread(self._children[process].stop, grace_s)
        await asyncio.sleep(after_s)
        self._start(process)
        await asyncio.to_thread(self._children[process].wait_ready, START_S)

    async def _until_ready(self, wanted: set[FleetProcess]) -> None:
        async with asyncio.timeout(START_S):
            while True:
                if wanted <= await self.ready():
                    return
                await asyncio.sleep(0.1)

    async def ready(self) -> set[FleetProcess]:
        """The processes that nobody harms now, that are up, and that their peers reach.

        Raises RuntimeError where a process ended by itself.
        """
        unharmed = [process for process in self._all if process not in self._harmed]
        for process in unharmed:
            if (status := self._children[process].poll()) is not None:
                raise RuntimeError(f"{process} ended by itself with exit status {status}")
        found = await asyncio.gather(*map(self._state, unharmed))
        up = {process: state for process, state in zip(unharmed, found, strict=True) if state is not None}
        views = [seen for process, seen in up.items() if process.role == "orchestrator"]
        unreached = {
            process
            for process in up
            if process.role == "verifier" and not all(self.address[process] in seen for seen in views)
        }
        verifiers = {self.address[process] for process in up if process.role == "verifier"}
        idle = {process for process in up if process.role == "orchestrator" and not up[process] & verifiers}
        return up.keys() - unreached - idle

    def close(self) -> None:
        """Ends all processes, held processes too; none is left when this returns."""
        for child in self._children.values():
            if child.poll() is None:
                os.kill(child.pid, signal.SIGCONT)
                child.terminate()
        for child in self._children.values():
            child.stop(STOP_S)
        self._held.close()

    async def _state(self, process: FleetProcess) -> set[str] | None:
        """The peers that an orchestrator reaches, none for other roles; None where a process is not ready."""
        if process.role == "redis":
            return set() if await asyncio.to_thread(answers, self.address[process]) else None
        path = "/metrics" if process.role == "orchestrator" else "/readyz"
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                status, body = await _get(self._metrics[process], path)
        except (OSError, TimeoutError):
            return None
        return set(_PEER_UP.findall(body)) if status == 200 else None

    def _start(self, process: FleetProcess) -> None:
        makers: dict[str, Callable[[FleetProcess], HarmedChild]] = {"redis": self._redis}
        self._children[process] = makers.get(process.role, self._service)(process)

    def _redis(self, process: FleetProcess) -> HarmedChild:
        return RedisProcess(self.address[process])

    def _service(self, process: FleetProcess) -> HarmedChild:
        role = process.role
        flags = ["--bind", self.address[process], "--metrics-bind", self._metrics[process]]
        flags += ["--log-level", self._log_level]
        if role == "orchestrator":
            flags += ["--edge-bind", "127.0.0.1:0"] if self._devices else []
            flags += ["--store", "redis", "--redis-url", f"redis://{self.addresses('redis')}"]
            for peers in ("verifier", "drafter", "retrieval"):
                flags += [f"--{peers}", self.addresses(peers)]
        elif role == "retrieval":
            tokenizer = Path(self._models["verifier"]) / "tokenizer.json"
            flags += ["--tokenizer", str(tokenizer)] if tokenizer.is_file() else []
        else:
            flags += ["--model", self._models[role], "--threads", "1", "--kv-mb", "256", "--passes", "eager"]
        if role == "verifier":
            flags += ["--deterministic"] if self._deterministic else []
            flags += ["--heads", self._heads] if self._heads else []
        if role == "drafter" and self._learnt is not None:
            flags += [*LEARNS, "--learn-dir", str(self._learnt / f"drafter-{process.number}")]
        module = role if role == "orchestrator" else f"{role}_service"
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(self._checkouts.of(process))
        return ServiceProcess.start(role, module, flags, env=environment)


async def _hold(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _get(address: str, path: str) -> tuple[int, str]:
    """Status and body of one HTTP request. Raises OSError where no process serves the address."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    finally:
        writer.close()
    status = head.split(maxsplit=2)[1:2]
    return int(status[0]) if status and status[0].isdigit() else 0, body
