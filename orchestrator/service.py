"""Puts the orchestrator together from its settings, and runs it inside a process."""

import logging
import secrets
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import grpc.aio

from orchestrator.edge.account import Credits
from orchestrator.edge.devices import Devices, EdgeLimits
from orchestrator.edge.drafters import DraftersOf, watched_drafters
from orchestrator.edge.server import EdgeServer
from orchestrator.edge.source import EdgeSource
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.registry import RegistryServer
from orchestrator.fleet.shared_load import SharedLoad
from orchestrator.fleet.verifier_link import Patience
from orchestrator.front.admission import Admission
from orchestrator.front.auth import Gate, watched_keys
from orchestrator.front.cluster_quotas import ClusterQuotas
from orchestrator.front.concurrency import ConcurrencyLimit
from orchestrator.front.fetched_keys import FetchedKeys
from orchestrator.front.generating import StreamAnswerer
from orchestrator.front.grpc import GenerationServer
from orchestrator.front.tls import front_certificates, warn_of_open_doors
from orchestrator.front.web_tokens import KeySource, TokenRules, watched_signing_keys
from orchestrator.metrics import BodyMetrics, EdgeMetrics, RequestMetrics, StoreMetrics, watch_fleet
from orchestrator.relay.epochs import Epochs
from orchestrator.relay.relay import Relay
from orchestrator.settings import FOR_NOTHING, NOWHERE, REDIS, WITHOUT_TLS, OrchestratorSettings
from orchestrator.store import SessionStore, open_store
from orchestrator.store.ledger import Ledger
from orchestrator.store.quotas import QuotaStore
from outrider.runtime.security import RoleCheck, certificates, inside
from outrider.runtime.serve import ServiceContext
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from outrider.wire.epochs import wall_clock_ms
from outrider.wire.incoming.unparsed import unparsed
from outrider.wire.tls import Certificates, Files
from speculative.errors import InvalidRequest, OutriderError

if TYPE_CHECKING:
    from orchestrator.front.http.connections.server import HttpServer

log = logging.getLogger(__name__)

VERIFIERS_WAIT_S = 5.0
"""How long a start waits for verifiers, since requests come as soon as this process is ready."""


class OrchestratorService:
    """The service that `outrider.runtime` serves; ready once it has tried to reach its verifiers."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        shared_load: SharedLoad,
        server: GenerationServer,
        limit: ConcurrencyLimit,
        http: "HttpServer | None",
        relay: Relay,
        registry: RegistryServer | None,
        quotas: ClusterQuotas | None,
        edge: EdgeServer | None,
    ) -> None:
        self._quotas = quotas
        self._edge = edge
        self._fleet = fleet
        self._shared_load = shared_load
        self._ledger = ledger
        self._server = server
        self._limit = limit
        self._http = http
        self._relay = relay
        self._registry = registry

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        add_GenerationServicer_to_server(self._server, unparsed(server))
        return (generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)

    async def start(self) -> None:
        self._fleet.start()
        if self._registry is not None:
            await self._registry.start()
        if self._edge is not None:
            await self._edge.start()
        self._relay.start()
        self._ledger.start()
        self._shared_load.start()
        if self._quotas is not None:
            self._quotas.start()
        if self._http is not None:
            self._http.start()
        await self._fleet.wait_for_verifiers(VERIFIERS_WAIT_S)

    async def stop(self, grace: float) -> None:
        await _stopped("requests", self._limit.stop(grace))
        # The process cuts off a stop that takes too long. The ledger still has changes to write, so it goes
        # before the slow parts; only what uses its store goes before it.
        store_users = (self._registry, self._shared_load, self._quotas, self._relay)
        for part in (*store_users, self._ledger, self._edge, self._http, self._fleet):
            if part is not None:
                await _stopped(type(part).__name__, part.stop())


async def _stopped(name: str, stopping: Coroutine[Any, Any, None]) -> None:
    """Wait until a part has stopped; a fault in one part keeps no other from stopping."""
    try:
        await stopping
    except Exception:
        log.exception("%s did not stop", name)


async def build(context: ServiceContext[OrchestratorSettings]) -> OrchestratorService:
    """Build the orchestrator of these settings; binds its ports, and dials no worker yet."""
    settings = context.settings
    fleet = _fleet(settings)
    watch_fleet(context.metrics, fleet)
    store_metrics = StoreMetrics(context.metrics)
    store = _store(settings)
    registry = _registry(context, fleet, store)
    ledger = Ledger(store, store_metrics.seconds.observe)
    store_metrics.watch(ledger)
    edge_metrics = EdgeMetrics(context.metrics)
    edge = _edge_server(context, edge_metrics)
    relay = Relay(
        fleet,
        ledger,
        Epochs(wall_clock_ms, secrets.randbits),
        settings.recover_s,
        edge="" if edge is None else edge.address,
    )
    metrics = RequestMetrics(context.metrics, context.tracing)
    body_metrics = BodyMetrics(context.metrics)
    limit = ConcurrencyLimit(relay, settings.max_streams)
    quotas = _cluster_quotas(settings, store, store_metrics)
    gate = _gate(settings, metrics, quotas)
    warn_of_open_doors(settings)
    admission = Admission(fleet, ledger.recorded, settings.default_max_tokens)
    source = None if edge is None else edge.source
    devices = Devices(source, _edge_limits(settings), edge_metrics.forward, edge_metrics.drop)
    answerer = StreamAnswerer(admission, relay, metrics, limit, devices)
    drafters_of = _drafters_of(settings)
    server = GenerationServer(fleet, relay, answerer, gate, drafters_of)
    http = None
    if settings.http_bind is not None:
        http = _http_server(
            settings.http_bind,
            context,
            body_metrics,
            fleet,
            admission,
            relay,
            metrics,
            limit,
            gate,
            answerer,
            drafters_of,
        )
    return OrchestratorService(
        fleet, ledger, SharedLoad(fleet, store), server, limit, http, relay, registry, quotas, edge
    )


def _fleet(settings: OrchestratorSettings) -> Fleet:
    """The workers that the settings name; none is dialled yet."""
    return Fleet(
        settings.verifier,
        (*settings.drafter, *settings.retrieval),
        Patience(settings.silent_s, settings.stalled_s),
        settings.max_message_mb,
        resolve_s=settings.resolve_s,
        certificates=certificates(
            settings, serves=settings.registry_bind is not None or settings.edge_bind is not None
        ),
    )


def _cluster_quotas(
    settings: OrchestratorSettings, store: SessionStore, store_metrics: StoreMetrics
) -> ClusterQuotas | None:
    """Quotas that all orchestrators of a store share; None where no tenant is known, or nothing is shared."""
    knows_tenants = settings.api_keys_file is not None or settings.takes_tokens
    if not (knows_tenants and isinstance(store, QuotaStore)):
        return None
    return ClusterQuotas(store, store_metrics.quota_seconds.observe)


def _http_server(
    bind: str,
    context: ServiceContext[OrchestratorSettings],
    body_metrics: BodyMetrics,
    fleet: Fleet,
    admission: Admission,
    relay: Relay,
    metrics: RequestMetrics,
    limit: ConcurrencyLimit,
    gate: Gate,
    answerer: StreamAnswerer,
    drafters_of: DraftersOf,
) -> "HttpServer":
    """The HTTP front, bound. An orchestrator without this front starts sooner and is smaller."""
    from orchestrator.front.http.app import make_app
    from orchestrator.front.http.bodies.intake import BodyIntake
    from orchestrator.front.http.bodies.pool import ReaderPool
    from orchestrator.front.http.completion_service import CompletionService
    from orchestrator.front.http.connections.server import HttpServer
    from orchestrator.front.http.templated.response_parsers import ResponseParsers
    from orchestrator.front.http.translate import AnswerDefaults

    settings = context.settings
    pool = ReaderPool(observe=body_metrics.seconds.observe, ended=body_metrics.ended.inc)
    body_metrics.waiting.set_function(lambda: pool.waiting)
    intake = BodyIntake(admission.targets, settings.max_streams, settings.max_message_mb * 2**20, pool)
    defaults = AnswerDefaults(
        settings.default_max_tokens, settings.chat_max_tokens, settings.generation_config == "auto"
    )
    parsers = ResponseParsers()
    completions = CompletionService(fleet, admission, relay, metrics, limit, intake, defaults, parsers)
    app = make_app(
        completions, answerer, gate, drafters_of, fleet, settings.http_origins, with_page=settings.page
    )
    http = HttpServer(
        app,
        intake,
        parsers,
        bind,
        front_certificates(settings),
        settings.max_connections,
        settings.max_message_mb * 2**20,
    )
    context.also["http"] = http.url
    return http


def _store(settings: OrchestratorSettings) -> SessionStore:
    """The store that the settings name. Raises InvalidRequest where they contradict each other."""
    url = "" if settings.redis_url is None else settings.redis_url.get_secret_value()
    if settings.store == "memory":
        if url:
            raise InvalidRequest(FOR_NOTHING)
        return open_store("memory")
    if not url:
        raise InvalidRequest(NOWHERE)
    files = _redis_files(settings, url)
    try:
        return open_store("redis", url, *files)
    except ImportError as error:
        raise InvalidRequest("store is redis, but redis-py is not installed here: install it") from error
    except ValueError as error:  # its text may quote the URL, hence a password
        raise InvalidRequest("the Redis URL is none: redis://, rediss:// and unix:// are possible") from error


def _redis_files(settings: OrchestratorSettings, url: str) -> tuple[str, ...]:
    """Paths of the PEM files for Redis, checked: authority, certificate, key. Raises InvalidRequest."""
    ca, cert, key = settings.redis_ca, settings.redis_cert, settings.redis_key
    if problem := REDIS.problem(vars(settings)):
        raise InvalidRequest(str(problem))
    if (ca or cert) and not url.startswith("rediss://"):
        raise InvalidRequest(WITHOUT_TLS)
    Certificates(Files(cert, key, ca, ("redis_cert", "redis_key", "redis_ca"), server=False))
    return tuple("" if path is None else str(path) for path in (ca, cert, key))


def _registry(
    context: ServiceContext[OrchestratorSettings], fleet: Fleet, store: SessionStore
) -> RegistryServer | None:
    """The registry, bound; None where the settings want none."""
    settings = context.settings
    if settings.registry_bind is None:
        return None
    listening = inside(settings)
    registry = RegistryServer(
        fleet,
        None if settings.store == "memory" else store,
        settings.registry_bind,
        credentials=listening.credentials,
        interceptors=listening.interceptors,
    )
    context.also["registry"] = registry.address
    return registry


def _edge_server(context: ServiceContext[OrchestratorSettings], metrics: EdgeMetrics) -> EdgeServer | None:
    """The port for verifiers that fetch devices' drafts, bound; None where the settings want none."""
    settings = context.settings
    if settings.edge_bind is None:
        return None
    source = EdgeSource(metrics.unread.inc)
    metrics.sessions.set_function(lambda: source.sessions)
    metrics.followed.set_function(lambda: source.followed)
    listening = inside(settings)
    server = EdgeServer(
        source,
        settings.edge_bind,
        settings.edge_advertise or "",
        settings.max_message_mb,
        listening.credentials,
        () if listening.credentials is None else (RoleCheck(("verifier",)),),
    )
    context.also["edge"] = server.address
    return server


def _edge_limits(settings: OrchestratorSettings) -> EdgeLimits:
    return EdgeLimits(
        Credits(settings.edge_credits, settings.edge_credits_per_token),
        settings.edge_wait_ms,
        settings.edge_devices_per_tenant,
        settings.edge_nodes_per_s,
    )


def _drafters_of(settings: OrchestratorSettings) -> DraftersOf:
    """What the settings list for devices to download. Raises InvalidRequest."""
    if settings.edge_drafters_file is None:
        return lambda target: ()
    watched = watched_drafters(settings.edge_drafters_file)
    return lambda target: watched.current().of(target)


def _gate(settings: OrchestratorSettings, metrics: RequestMetrics, quotas: ClusterQuotas | None) -> Gate:
    """The gate, which counts the callers that it refuses. Raises InvalidRequest."""

    def refused(error: OutriderError) -> None:
        metrics.errors.labels(type(error).__name__).inc()

    file = settings.api_keys_file
    keys = None if file is None else watched_keys(file)
    tokens = None
    if settings.takes_tokens:
        rules = TokenRules(settings.jwt_issuer, settings.jwt_audience, settings.jwt_tenant_claim)
        tokens = _signing_keys(settings), rules
    return Gate(keys, settings.max_streams_per_peer, refused, cluster=quotas, tokens=tokens)


def _signing_keys(settings: OrchestratorSettings) -> KeySource:
    """The keys of JSON Web Tokens. Raises InvalidRequest."""
    if settings.jwt_keys_file is not None:
        return watched_signing_keys(settings.jwt_keys_file)
    return FetchedKeys(settings.jwt_keys_url)
