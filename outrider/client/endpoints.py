"""Which orchestrators a client calls, how long it waits for them, and the credentials that it shows.

Shared by the blocking and the asyncio client. Pure but for the clock.
"""

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from outrider.client.option_checks import fault, is_number
from outrider.client.options import Options
from outrider.wire.keys import bearer
from outrider.wire.names import is_host_port
from outrider.wire.tls import Certificates, Files
from speculative.errors import InvalidRequest

CONTROL_S = 10.0
"""Timeout of Cancel, Explain and ListModels, in seconds."""
SEVERAL_S = 30.0
"""Seconds that a request keeps looking for another orchestrator where the client has several."""
PATIENCE_MS = 10_000
"""Milliseconds that the only orchestrator may leave a ping unanswered: there is nowhere else to go."""
AMONG_SEVERAL_MS = 450
"""The same for one of several orchestrators: moving on costs little, even if that one was only slow."""
_NAMES = ("cert", "cert_key", "ca")
_DNS = re.compile(r"^dns:(///)?")
"""What may stand before host:port: gRPC then knows that a name follows."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows to orchestrators, and which of them it trusts."""

    certificates: Certificates | None = None
    """For TLS; None: connections are not encrypted."""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Sent with every call; holds the API key."""


def credentials_of(
    api_key: object = None, ca: object = None, cert: object = None, cert_key: object = None
) -> Credentials:
    """Credentials from a client's arguments. Raises InvalidRequest, naming the file but never the key."""
    if api_key is not None and not isinstance(api_key, str):
        raise InvalidRequest(f"api_key is of type {type(api_key).__name__}; give the key as a string")
    metadata = () if api_key is None else bearer(api_key)
    authority, own, key = _path("ca", ca), _path("cert", cert), _path("cert_key", cert_key)
    if authority is None and own is None and key is None:
        return Credentials(None, metadata)
    if authority is None or (own is None) != (key is None):
        raise InvalidRequest("cert and cert_key go together, and need ca: whom to believe")
    return Credentials(Certificates(Files(own, key, authority, _NAMES, server=False)), metadata)


def _path(name: str, path: object) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise fault(name, path, "the path of a file")
    return Path(path)


def addresses_in(address: object) -> list[str]:
    """Each host:port of a list with commas. Raises InvalidRequest where one is empty or cannot be dialled."""
    if not isinstance(address, str):
        raise fault("address", address, "a string: host:port of an orchestrator, or several with commas")
    addresses = [one.strip() for one in address.split(",")]
    if not all(addresses):
        raise InvalidRequest("the address is empty; give an orchestrator's host:port, or several with commas")
    for one in addresses:
        if not is_host_port(_DNS.sub("", one)):
            raise InvalidRequest(
                f"the address is {one[:80]!r}; give host:port of an orchestrator's gRPC, port 1 to 65535"
            )
    return addresses


def ping_patience_ms(addresses: list[str]) -> int:
    """How long each of these orchestrators may leave a ping unanswered, in milliseconds."""
    return AMONG_SEVERAL_MS if len(addresses) > 1 else PATIENCE_MS


def patience_for(addresses: list[str], patience_s: float | None) -> float:
    """Seconds for which a lost request is retried; None is the default.

    Raises InvalidRequest below 0, and for what is no number.
    """
    if patience_s is None:
        return SEVERAL_S if len(addresses) > 1 else 0.0
    if not is_number(patience_s):
        raise fault("patience_s", patience_s, "a number of seconds")
    if not patience_s >= 0:
        raise InvalidRequest(f"patience_s is {patience_s}; 0 or more seconds are possible")
    return patience_s


def ends_at(options: Options) -> float | None:
    """The request's deadline on the monotonic clock; None: it has none."""
    timeout = options.get("timeout")
    return None if timeout is None else time.monotonic() + timeout


def time_left(ends: float | None) -> float | None:
    """Seconds until a deadline, above 0; None: there is no deadline."""
    return None if ends is None else max(0.001, ends - time.monotonic())
