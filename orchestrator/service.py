"""Puts the orchestrator together from its settings, and runs it inside a process."""

import secrets
from typing import TYPE_CHECKING

import grpc.aio

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.registry import RegistryServer
from orchestrator.fleet.shared_load import Loads
from orchestrator.fleet.verifier_link import Patience
from orchestrator.fleet_metrics import watch_peers
from orchestrator.front.concurrency import Room
from orchestrator.front.grpc import GenerationServer
from orchestrator.front.tls import front_certificates, make_gate, warn_of_open_doors
from orchestrator.metrics import RequestMetrics, StoreMetrics, watch_fleet
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.relay import Relay
from orchestrator.settings import OrchestratorSettings
from orchestrator.store.ledger import Ledger
from orchestrator.store.storing import chosen_store
from outrider.runtime.security import certificates, inside
from outrider.runtime.serve import ServiceContext
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from outrider.wire.epochs import wall_clock_ms

if TYPE_CHECKING:
    from orchestrator.front.http.server import HttpFront


class OrchestratorService:
    """The service that `outrider.runtime` serves: ready at once, whoever can be reached."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        loads: Loads,
        server: GenerationServer,
        room: Room,
        http: "HttpFront | None",
        relay: Relay,
        registry: RegistryServer | None,
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._ledger = ledger
        self._server = server
        self._room = room
        self._http = http
        self._relay = relay
        self._registry = registry

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        add_GenerationServicer_to_server(self._server, server)
        return (generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)

    async def start(self) -> None:
        self._fleet.start()
        if self._registry is not None:
            await self._registry.start()
        self._relay.start()
        self._ledger.start()
        self._loads.start()
        if self._http is not None:
            self._http.start()

    async def stop(self, grace: float) -> None:
        await self._room.stop(grace)
        if self._http is not None:
            await self._http.stop()
        if self._registry is not None:
            await self._registry.stop()
        await self._relay.stop()
        await self._loads.stop()
        await self._ledger.stop()
        await self._fleet.stop()


async def build(context: ServiceContext[OrchestratorSettings]) -> OrchestratorService:
    """The parts, joined; nothing is dialled yet."""
    settings = context.settings
    patience = Patience(settings.silent_s, settings.stalled_s)
    sources = (*settings.drafter, *settings.retrieval)
    fleet = Fleet(
        settings.verifier,
        sources,
        patience,
        settings.max_message_mb,
        resolve_s=settings.resolve_s,
        certificates=certificates(settings, serves=settings.registry_bind is not None),
    )
    watch_fleet(context.metrics, fleet)
    watch_peers(context.metrics, fleet)
    store_metrics = StoreMetrics(context.metrics)
    store = chosen_store(settings)
    registry = None
    if settings.registry_bind is not None:
        shared = None if settings.store == "memory" else store
        listening = inside(settings)
        registry = RegistryServer(
            fleet,
            shared,
            settings.registry_bind,
            credentials=listening.credentials,
            interceptors=listening.interceptors,
        )
        context.also["registry"] = registry.address
    ledger = Ledger(store, store_metrics.seconds.observe)
    store_metrics.watch(ledger)
    relay = Relay(fleet, ledger, Epochs(wall_clock_ms, secrets.randbits), settings.recover_s)
    metrics = RequestMetrics(context.metrics, context.tracing)
    room = Room(relay, settings.max_streams)
    gate = make_gate(settings, metrics)
    warn_of_open_doors(settings)
    server = GenerationServer(fleet, relay, metrics, room, gate, settings.default_max_tokens)
    http = None
    if settings.http_bind is not None:
        # Only here: a process without it starts sooner and is smaller.
        from orchestrator.front.http.app import make_app
        from orchestrator.front.http.completion_service import Desk
        from orchestrator.front.http.server import HttpFront

        desk = Desk(fleet, relay, metrics, room, settings.default_max_tokens)
        http = HttpFront(
            make_app(desk, gate, settings.max_message_mb * 2**20),
            settings.http_bind,
            front_certificates(settings),
            settings.max_connections,
        )
        context.also["http"] = http.url
    return OrchestratorService(fleet, ledger, Loads(fleet, store), server, room, http, relay, registry)
