"""The fronts' certificates, and warnings where a setting leaves a port open to anyone."""

import ipaddress
import logging

from orchestrator.settings import FRONT, OrchestratorSettings
from outrider.runtime.security import Listening
from outrider.wire.tls import Certificates, Files, server_credentials
from speculative.errors import InvalidRequest

log = logging.getLogger(__name__)

OTHER_CALLS = 64
"""Calls that one connection may have at once beside the requests that this process answers."""
_MOST_CALLS = 2**31 - 1
"""The largest number that gRPC takes."""
NAMES = ("front_cert", "front_key", "front_client_ca")


def front_certificates(settings: OrchestratorSettings) -> Certificates | None:
    """The certificates that clients see; None: connections are not encrypted. Raises InvalidRequest."""
    if problem := FRONT.problem(vars(settings)):
        raise InvalidRequest(str(problem))
    cert, key, ca = settings.front_cert, settings.front_key, settings.front_client_ca
    return None if cert is None else Certificates(Files(cert, key, ca, NAMES))


def grpc_listening(settings: OrchestratorSettings) -> Listening:
    """How the port that gRPC clients dial is secured and bounded. Raises InvalidRequest."""
    options = (
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        # gRPC itself refuses further calls before they cost the event loop anything: peers may open and leave
        # thousands in a few packets.
        ("grpc.max_concurrent_streams", min(settings.max_streams + OTHER_CALLS, _MOST_CALLS)),
    )
    certificates = front_certificates(settings)
    if certificates is None:
        return Listening(options=options)
    with_client_certificates = settings.front_client_ca is not None
    return Listening(server_credentials(certificates, clients=with_client_certificates), options=options)


def warn_of_open_doors(settings: OrchestratorSettings) -> None:
    """Log a warning for each port that other machines can use without a key or a certificate.

    Also warns where API keys travel in plain.
    """
    registry = settings.registry_bind
    if registry is not None and settings.tls_cert is None and not is_loopback(registry):
        log.warning(
            "anyone who can connect to %s may register as a worker, and is sent prompts: give tls_cert, "
            "tls_key and tls_ca, or let only workers reach this address",
            registry,
        )
    binds = [bind for bind in (settings.bind, settings.http_bind) if bind and not is_loopback(bind)]
    if not binds or settings.front_client_ca is not None:
        return
    where = ", ".join(binds)
    if settings.api_keys_file is None and not settings.takes_tokens:
        log.warning(
            "anyone who can connect to %s may send requests: give api_keys_file, or bind to 127.0.0.1", where
        )
    elif settings.front_cert is None:
        log.warning(
            "API keys come to %s in plain: give front_cert and front_key, unless a proxy has TLS",
            where,
        )


def is_loopback(bind: str) -> bool:
    """Whether only this machine can connect to `bind`, host:port."""
    host = bind.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
