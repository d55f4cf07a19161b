"""Puts the orchestrator together from its settings, and runs it inside a process."""

import secrets

import grpc.aio

from orchestrator.epochs import Epochs
from orchestrator.fleet import Fleet
from orchestrator.ledger import Ledger
from orchestrator.loads import Loads
from orchestrator.metrics import RequestMetrics, StoreMetrics, watch_fleet
from orchestrator.relay import Relay
from orchestrator.server import GenerationServer
from orchestrator.settings import OrchestratorSettings
from orchestrator.stores import SessionStore, open_store
from orchestrator.verifiers import Patience
from outrider.runtime.serve import ServiceContext
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from outrider.wire.epochs import wall_clock_ms
from speculative.errors import InvalidRequest


class OrchestratorService:
    """The service that `outrider.runtime` serves: ready at once, whoever can be reached."""

    def __init__(self, fleet: Fleet, ledger: Ledger, loads: Loads, server: GenerationServer) -> None:
        self._fleet = fleet
        self._loads = loads
        self._ledger = ledger
        self._server = server

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        add_GenerationServicer_to_server(self._server, server)
        return (generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)

    async def start(self) -> None:
        self._fleet.start()
        self._ledger.start()
        self._loads.start()

    async def stop(self, grace: float) -> None:
        await self._server.stop(grace)
        await self._loads.stop()
        await self._ledger.stop()
        await self._fleet.stop()


async def build(context: ServiceContext[OrchestratorSettings]) -> OrchestratorService:
    """The parts, joined; nothing is dialled yet."""
    settings = context.settings
    patience = Patience(settings.silent_s, settings.stalled_s)
    sources = (*settings.drafter, *settings.retrieval)
    fleet = Fleet(settings.verifier, sources, patience, settings.max_message_mb, resolve_s=settings.resolve_s)
    watch_fleet(context.metrics, fleet)
    store_metrics = StoreMetrics(context.metrics)
    store = _store(settings)
    ledger = Ledger(store, store_metrics.seconds.observe)
    store_metrics.watch(ledger)
    relay = Relay(fleet, ledger, Epochs(wall_clock_ms, secrets.randbits), settings.recover_s)
    server = GenerationServer(
        fleet,
        relay,
        RequestMetrics(context.metrics),
        max_streams=settings.max_streams,
        default_max_tokens=settings.default_max_tokens,
    )
    return OrchestratorService(fleet, ledger, Loads(fleet, store), server)


def _store(settings: OrchestratorSettings) -> SessionStore:
    """As the settings name it. Raises InvalidRequest where they contradict each other."""
    url = _redis_url(settings)
    if settings.store == "memory":
        if url:
            raise InvalidRequest("a Redis URL is given, but store is memory; give --store redis, too")
        return open_store("memory")
    if not url:
        raise InvalidRequest("store is redis, but nobody says where: give --redis-url-file or --redis-url")
    try:
        return open_store("redis", url)
    except ImportError as error:
        raise InvalidRequest("store is redis, but redis-py is not installed here: install it") from error
    except ValueError as error:  # its text may quote the URL, hence a password
        raise InvalidRequest("the Redis URL is none: redis://, rediss:// and unix:// are possible") from error


def _redis_url(settings: OrchestratorSettings) -> str:
    """Empty where there is none."""
    given, file = settings.redis_url, settings.redis_url_file
    if given is not None and file is not None:
        raise InvalidRequest("give redis_url or redis_url_file, not both")
    if file is None:
        return "" if given is None else given.get_secret_value()
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"redis_url_file {str(file)!r} cannot be read: {type(error).__name__}"
        ) from error
