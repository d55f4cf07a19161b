"""Services as processes that a test can kill, freeze and start again at the same address."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

from outrider.runtime.children import ServiceProcess, reserved_address, stop_all

LEVELS = {
    f"OUTRIDER_{role}__LOG_LEVEL": "warning" for role in ("VERIFIER", "DRAFTER", "RETRIEVAL", "ORCHESTRATOR")
}
PATIENT = {"OUTRIDER_ORCHESTRATOR__SILENT_S": "4"}
"""A busy machine takes a verifier's core away for moments in which nothing is lost."""
START_S = 250.0


class Services:
    """Services that a test starts one by one; `close` ends all of them, frozen ones too."""

    def __init__(self, model: Path, drafter: Path) -> None:
        self._models = {"verifier": model, "drafter": drafter}
        self._processes: list[ServiceProcess] = []
        self._held = ExitStack()

    def start(self, role: str, *flags: str, address: str = "") -> ServiceProcess:
        """Starts a service and returns once it is ready."""
        address = address or self._held.enter_context(reserved_address())
        module = role if role == "orchestrator" else f"{role}_service"
        process = ServiceProcess.start(role, module, ["--bind", address, *flags], env=LEVELS | PATIENT)
        self._processes.append(process)
        process.wait_ready(START_S)
        return process

    def verifier(self, address: str = "") -> ServiceProcess:
        return self._computing("verifier", address)

    def drafter(self, *flags: str, address: str = "") -> ServiceProcess:
        return self._computing("drafter", address, *flags)

    def orchestrator(
        self, verifiers: list[ServiceProcess], *flags: str, address: str = "", **peers: ServiceProcess
    ) -> ServiceProcess:
        dialled = ["--verifier", ",".join(verifier.address for verifier in verifiers)]
        for role, process in peers.items():
            dialled += [f"--{role}", process.address]
        return self.start("orchestrator", *dialled, *flags, address=address)

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
        stop_all(self._processes, 5.0)
        self._held.close()

    def _computing(self, role: str, address: str, *flags: str) -> ServiceProcess:
        own = flags if "--model" in flags else ("--model", str(self._models[role]), *flags)
        return self.start(role, *own, "--threads", "1", "--passes", "eager", address=address)
