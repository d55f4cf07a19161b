"""How clients are met: with which certificate, which keys they need, how many of them there may be."""

import ipaddress
import logging

from orchestrator.front.gate import Gate
from orchestrator.front.keys import watched_keys
from orchestrator.metrics import RequestMetrics
from orchestrator.settings import FRONT, OrchestratorSettings
from outrider.runtime.security import Listening
from outrider.wire.tls import Certificates, Files, server_credentials
from speculative.errors import InvalidRequest, OutriderError

log = logging.getLogger(__name__)

NAMES = ("front_cert", "front_key", "front_client_ca")


def front_certificates(settings: OrchestratorSettings) -> Certificates | None:
    """What clients are shown; None: they talk in plain. Raises InvalidRequest."""
    if problem := FRONT.problem(vars(settings)):
        raise InvalidRequest(str(problem))
    cert, key, ca = settings.front_cert, settings.front_key, settings.front_client_ca
    return None if cert is None else Certificates(Files(cert, key, ca, NAMES))


def front(settings: OrchestratorSettings) -> Listening:
    """For the port that clients dial over gRPC. Raises InvalidRequest."""
    options = (("grpc.max_allowed_incoming_connections", settings.max_connections),)
    shown = front_certificates(settings)
    if shown is None:
        return Listening(options=options)
    asks = settings.front_client_ca is not None
    return Listening(server_credentials(shown, clients=asks), options=options)


def make_gate(settings: OrchestratorSettings, metrics: RequestMetrics) -> Gate:
    """Lets in whom the settings name; who is not let in is counted. Raises InvalidRequest."""

    def refused(error: OutriderError) -> None:
        metrics.errors.labels(type(error).__name__).inc()

    file = settings.api_keys_file
    keys = None if file is None else watched_keys(file)
    return Gate(keys, settings.max_streams_per_peer, refused)


def warn_of_open_doors(settings: OrchestratorSettings) -> None:
    """Says so where more than this machine can ask without a key, or register without a certificate, or
    where keys travel in plain."""
    registry = settings.registry_bind
    if registry is not None and settings.tls_cert is None and not is_loopback(registry):
        log.warning(
            "whoever can connect to %s may register as a worker, and is sent prompts: give tls_cert, tls_key "
            "and tls_ca, or keep all but workers away from it",
            registry,
        )
    binds = [bind for bind in (settings.bind, settings.http_bind) if bind and not is_loopback(bind)]
    if not binds or settings.front_client_ca is not None:
        return
    where = ", ".join(binds)
    if settings.api_keys_file is None:
        log.warning("whoever can connect to %s may ask: give api_keys_file, or bind to 127.0.0.1", where)
    elif settings.front_cert is None:
        log.warning(
            "API keys come to %s in plain: give front_cert and front_key, unless a proxy has TLS",
            where,
        )


def is_loopback(bind: str) -> bool:
    """Whether only this machine can connect to host:port."""
    host = bind.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
