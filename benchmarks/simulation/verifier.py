"""A simulated verifier: the real server, sessions, readers and links around the toy engine."""

import random
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from benchmarks.simulation.calls import Server
from benchmarks.simulation.clock import Process
from benchmarks.simulation.engine import ToyEngine
from benchmarks.simulation.head import HEAD, ToyHead
from benchmarks.simulation.network import Network
from benchmarks.simulation.toy import EOS, MAX_LENGTH, MODEL, VOCABULARY
from outrider.runtime.metrics import Metrics
from outrider.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from verifier_service.engine.messages import StepReport
from verifier_service.remote_sources.stream import LinkLimits
from verifier_service.server import VerifierServer
from verifier_service.settings import VerifierSettings

GRACE_S = 0.4
LEASE_S = 0.4
NODE_LIMIT = 4


@dataclass(frozen=True, slots=True)
class VerifierShape:
    """How one verifier computes."""

    step_s: float = 0.02
    blocks: int = 64
    most_running: int = 8
    head: bool = False
    """Whether a head drafts inside the verifier."""


@lru_cache
def _settings() -> VerifierSettings:
    return VerifierSettings(
        model="toy",
        model_name=MODEL,
        node_limit=NODE_LIMIT,
        orphan_grace_s=GRACE_S,
        lease_s=LEASE_S,
        threads=1,
    )


@lru_cache
def _metrics() -> Metrics:
    return Metrics("verifier")


_TARGET: Any = SimpleNamespace(
    max_length=MAX_LENGTH,
    pool=SimpleNamespace(max_slots=1 << 20, chains_only=False),
    tokenizer_json=None,
    chat=None,
    name=MODEL,
    model_type="toy",
    vocabulary_size=VOCABULARY,
    eos_ids=(EOS,),
    numerics="toy",
    sampling_defaults={},
)


class Verifier:
    """One incarnation of a verifier's process."""

    def __init__(self, network: Network, address: str, shape: VerifierShape, chance: random.Random) -> None:
        self.process = Process(network.loop, address)
        self.process.run(self._begin, network, shape, chance)

    def _begin(self, network: Network, shape: VerifierShape, chance: random.Random) -> None:
        process = self.process

        def no_target() -> Any:
            raise AssertionError("the toy target is not loaded")

        self.server = VerifierServer(
            _settings(), no_target, _metrics(), process_failed, LinkLimits(redial_most_s=0.5)
        )
        inner: Any = self.server

        def publish(report: StepReport) -> None:
            network.loop.call_soon(inner._absorb, report)

        self.table = inner._table
        self.engine = inner._engine = ToyEngine(
            network.loop,
            self.table,
            publish,
            chance,
            shape.step_s,
            shape.blocks,
            shape.most_running,
            {HEAD: ToyHead(chance)} if shape.head else {},
        )
        inner._describe(_TARGET, None, batched=self.engine.core.proposers.names)
        self._sources = inner._sources
        listening: Any = Server(network, process, process.name)
        add_VerifierServicer_to_server(self.server, listening)
        process.spawn(self.engine.run())
        inner._tasks.append(process.spawn(inner._sweep()))

    async def stop(self) -> None:
        """As SIGTERM does."""
        await self.server.stop(0.3)
        self.process.kill()

    def left(self) -> dict[str, int]:
        """What it still holds for sessions; all zero when nobody needs anything."""
        return {
            "sessions": len(self.table._by_key),
            "running": self.table.running,
            "decoding": len(self.engine.core.sessions),
            "waiting": self.engine.core.sessions.scheduler.waiting,
            "slots": self.engine.core.kv.running_slots,
            "followed": len(self._sources._by_session),
        }


def process_failed(error: BaseException) -> None:
    """What ends a verifier's engine is a fault."""
    raise error
