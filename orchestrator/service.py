"""Puts the orchestrator together from its settings, and runs it inside a process."""

import secrets

import grpc.aio

from orchestrator.epochs import Epochs
from orchestrator.fleet import Fleet
from orchestrator.metrics import RequestMetrics, watch_fleet
from orchestrator.relay import Relay
from orchestrator.server import GenerationServer
from orchestrator.settings import OrchestratorSettings
from orchestrator.stores import open_store
from orchestrator.verifiers import Patience
from outrider.runtime.serve import ServiceContext
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from outrider.wire.epochs import wall_clock_ms


class OrchestratorService:
    """The service that `outrider.runtime` serves: ready at once, whoever can be reached."""

    def __init__(self, fleet: Fleet, server: GenerationServer) -> None:
        self._fleet = fleet
        self._server = server

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        add_GenerationServicer_to_server(self._server, server)
        return (generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)

    async def start(self) -> None:
        self._fleet.start()

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
        await self._fleet.stop()


async def build(context: ServiceContext[OrchestratorSettings]) -> OrchestratorService:
    """The parts, joined; nothing is dialled yet."""
    settings = context.settings
    patience = Patience(settings.silent_s, settings.stalled_s)
    sources = (*settings.drafter, *settings.retrieval)
    fleet = Fleet(settings.verifier, sources, patience, settings.max_message_mb, resolve_s=settings.resolve_s)
    watch_fleet(context.metrics, fleet)
    relay = Relay(
        fleet, open_store(settings.store), Epochs(wall_clock_ms, secrets.randbits), settings.recover_s
    )
    server = GenerationServer(
        fleet,
        relay,
        RequestMetrics(context.metrics),
        max_streams=settings.max_streams,
        default_max_tokens=settings.default_max_tokens,
    )
    return OrchestratorService(fleet, server)
