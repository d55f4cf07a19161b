"""A simulated orchestrator: all of the real one except its process, sockets and store."""

import random
from functools import lru_cache
from typing import Any

from benchmarks.simulation.calls import Server
from benchmarks.simulation.clock import EPOCH_NS, Process
from benchmarks.simulation.network import Network
from benchmarks.simulation.stores import RemoteStore, StoreServer
from orchestrator.edge.account import Credits
from orchestrator.edge.devices import Devices, EdgeLimits
from orchestrator.edge.source import EdgeSource
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.shared_load import SharedLoad
from orchestrator.fleet.verifier_link import Patience
from orchestrator.front.admission import Admission
from orchestrator.front.auth import Gate
from orchestrator.front.concurrency import ConcurrencyLimit
from orchestrator.front.generating import StreamAnswerer
from orchestrator.front.grpc import GenerationServer
from orchestrator.metrics import RequestMetrics
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.relay import Relay
from orchestrator.store.ledger import Ledger
from outrider.runtime.metrics import Metrics
from outrider.v1.draft_source_pb2_grpc import add_DraftSourceServicer_to_server
from outrider.v1.generation_pb2_grpc import add_GenerationServicer_to_server

RECOVER_S = 30.0
EDGE_LIMITS = EdgeLimits(Credits(64, 16), most_wait_ms=200, devices_per_tenant=100, nodes_per_s=10_000)


@lru_cache
def _metrics() -> RequestMetrics:
    return RequestMetrics(Metrics("orchestrator"))


class SimulatedOrchestrator:
    """One incarnation of an orchestrator's process.

    Args:
        verifiers: the verifiers' addresses.
        sources: the sources' addresses.
        ahead_s: seconds by which the wall clock is ahead of the others'; negative where it is behind.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        verifiers: list[str],
        sources: list[str],
        store: StoreServer,
        chance: random.Random,
        ahead_s: float = 0.0,
    ) -> None:
        self.process = Process(network.loop, address)
        self.ahead_s = ahead_s
        self._loop = network.loop
        self.process.run(self._begin, network, verifiers, sources, store, chance)

    def _begin(
        self,
        network: Network,
        verifiers: list[str],
        sources: list[str],
        store: StoreServer,
        chance: random.Random,
    ) -> None:
        remote = RemoteStore(store, chance)
        self.fleet = Fleet(verifiers, sources, Patience(stalled_s=1.5))
        self._ledger = Ledger(remote, lambda seconds: None)
        edge = f"edge of {self.process.name}"
        self._relay = Relay(
            self.fleet, self._ledger, Epochs(self._clock_ms, chance.getrandbits), RECOVER_S, edge
        )
        self._loads = SharedLoad(self.fleet, remote)
        self._limit = ConcurrencyLimit(self._relay, 256)
        listening: Any = Server(network, self.process, self.process.name)
        attached: Any = Server(network, self.process, edge)
        self._edge = EdgeSource(lambda count: None)
        add_DraftSourceServicer_to_server(self._edge, attached)
        devices = Devices(
            self._edge, EDGE_LIMITS, lambda count: None, lambda why, count: None, network.loop.time
        )
        admission = Admission(self.fleet, self._ledger.recorded, 128)
        answerer = StreamAnswerer(admission, self._relay, _metrics(), self._limit, devices)
        server = GenerationServer(self.fleet, self._relay, answerer, Gate(None), lambda target: ())
        add_GenerationServicer_to_server(server, listening)
        self.fleet.start()
        self._relay.start()
        self._ledger.start()
        self._loads.start()

    def _clock_ms(self) -> int:
        return EPOCH_NS // 10**6 + int((self._loop.now + self.ahead_s) * 1000)

    async def stop(self) -> None:
        """Stops the orchestrator in order, as SIGTERM does."""
        await self._limit.stop(0.3)
        await self._relay.stop()
        await self._loads.stop()
        await self._ledger.stop()
        await self.fleet.stop()
        self.process.kill()

    @property
    def reaches(self) -> int:
        """Number of verifiers whose beats arrive."""
        return sum(link.reachable for link in self.fleet.verifiers.values())

    def left(self) -> dict[str, int]:
        """Counts of everything that is still held for requests; all zero without requests."""
        return {
            "requests": len(self._relay._running),
            "kept track of": self._ledger.waiting,
            "read": sum(link.sessions for link in self.fleet.verifiers.values()),
            "of sources": sum(link.sessions for link in self.fleet.sources.values()),
            "devices": self._edge.sessions + self._edge.followed,
            "calls": sum(len(link._background) for link in self.fleet.verifiers.values()),
        }
