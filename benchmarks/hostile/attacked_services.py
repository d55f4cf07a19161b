"""The services that hostile inputs are sent to: both fronts with keys, the registry, a verifier and sources.

Starts and reads processes; knows nothing of inputs.
"""

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.shared.process_memory import resident_bytes
from outrider.runtime.children import ServiceProcess, stop_all
from outrider.v1.generation_pb2 import ListModelsRequest
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel
from outrider.wire.keys import key_digest, new_key

ROLES = ("verifier", "drafter", "retrieval", "orchestrator")
START_S = 180.0
STOP_S = 5.0
TENANTS = ("canary", "attacker")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a hostile client reaches the services, and the key that it has."""

    http: str
    """host:port of the HTTP front."""
    addresses: dict[str, str] = field(default_factory=dict)
    """host:port of each role's gRPC port, and of `registry`."""
    key: str = ""

    def host_and_port(self, role: str) -> tuple[str, int]:
        """Host and port of a gRPC port, or of `http`."""
        host, _, port = (self.http if role == "http" else self.addresses[role]).rpartition(":")
        return host, int(port)


class AttackedServices:
    """Running services with the embedded pair; a context manager that ends them."""

    def __init__(self, target: str, drafter: str, further_sources: Sequence[str]) -> None:
        """Starts the processes and returns when all are ready.

        Args:
            further_sources: host:port of more sources that sessions draft from.
        """
        self._held = ExitStack()
        self._logs = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        self._children: dict[str, ServiceProcess] = {}
        self.keys = {tenant: new_key() for tenant in TENANTS}
        """A key of each tenant."""
        keys_file = self._logs / "keys"
        lines = [{"sha256": key_digest(key), "tenant": tenant} for tenant, key in self.keys.items()]
        keys_file.write_text("\n".join(map(json.dumps, lines)))
        try:
            self._start("drafter", "--model", drafter, "--threads", "1", "--passes", "eager")
            self._start("retrieval", "--tokenizer", str(Path(target) / "tokenizer.json"))
            self._start(
                "verifier", "--model", target, "--threads", "1", "--passes", "eager", "--deterministic"
            )
            self._wait("drafter", "retrieval", "verifier")
            sources = ",".join([self._children["retrieval"].address, *further_sources])
            peers = ["--verifier", self._children["verifier"].address, "--retrieval", sources]
            peers += ["--drafter", self._children["drafter"].address]
            fronts = ["--http-bind", "127.0.0.1:0", "--registry-bind", "127.0.0.1:0"]
            self._start("orchestrator", *peers, *fronts, "--api-keys-file", str(keys_file))
            self._wait("orchestrator")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        stop_all(self._children.values(), STOP_S)
        self._held.close()

    @property
    def ports(self) -> Ports:
        """The ports, with the attacker's key."""
        front = self._children["orchestrator"]
        addresses = {role: child.address for role, child in self._children.items()}
        addresses["registry"] = front.registry
        return Ports(front.http.removeprefix("http://"), addresses, self.keys["attacker"])

    def ended(self) -> Sequence[str]:
        """Roles whose process has ended."""
        return [role for role, child in self._children.items() if child.poll() is not None]

    def resident_bytes(self) -> int:
        """Bytes in RAM of all processes together."""
        return sum(resident_bytes(child.pid) for child in self._children.values())

    def stalls(self) -> list[dict[str, Any]]:
        """The recent stalls of all processes, each with its `role`. Blocks."""
        found = []
        for role, child in self._children.items():
            with urllib.request.urlopen(f"http://{child.metrics}/stalls", timeout=60) as reply:
                found += [{"role": role, **stall} for stall in json.loads(reply.read())]
        return found

    def tracebacks(self) -> int:
        """How many tracebacks the processes have logged so far."""
        return sum(path.read_bytes().count(b"Traceback (most recent") for path in self._logs.glob("*.log"))

    def _start(self, role: str, *flags: str) -> None:
        module = role if role == "orchestrator" else f"{role}_service"
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        log = self._logs / f"{role}.log"
        self._children[role] = ServiceProcess.start(role, module, flags, env=environment, log_path=log)

    def _wait(self, *roles: str) -> None:
        for role in roles:
            self._children[role].wait_ready(START_S)


async def until_calm(services: AttackedServices, seconds: float) -> bool:
    """Returns once the loop of every process answers again; False where one does not within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            for role in ROLES:
                async with open_channel(services.ports.addresses[role]) as channel:
                    stub: Any = health_pb2_grpc.HealthStub(channel)
                    await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    except (TimeoutError, grpc.aio.AioRpcError):
        return False
    return True


async def until_served(services: AttackedServices, sources: int) -> None:
    """Returns once the front serves a model with `sources` sources."""
    metadata = (("authorization", f"Bearer {services.keys['canary']}"),)
    async with open_channel(services.ports.addresses["orchestrator"]) as channel, asyncio.timeout(START_S):
        stub: Any = GenerationStub(channel)
        while True:
            models = (await stub.ListModels(ListModelsRequest(), metadata=metadata)).models
            if any(len(model.sources) >= sources for model in models):
                return
            await asyncio.sleep(0.1)
