"""How a client shows who it is, and whom it believes: an API key, certificates."""

from dataclasses import dataclass, field
from pathlib import Path

from outrider.wire.keys import bearer
from outrider.wire.tls import Certificates, Files
from speculative.errors import InvalidRequest

_NAMES = ("cert", "cert_key", "ca")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What goes with a client's connections and calls."""

    certificates: Certificates | None = None
    """None: plain."""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def credentials_of(
    api_key: str | None, ca: str | Path | None, cert: str | Path | None, cert_key: str | Path | None
) -> Credentials:
    """From what Client is given. Raises InvalidRequest, which names the file but never the key."""
    metadata = () if api_key is None else bearer(api_key)
    if ca is None and cert is None and cert_key is None:
        return Credentials(None, metadata)
    if ca is None or (cert is None) != (cert_key is None):
        raise InvalidRequest("cert and cert_key go together, and need ca: whom to believe")
    own, key = (None if path is None else Path(path) for path in (cert, cert_key))
    return Credentials(Certificates(Files(own, key, Path(ca), _NAMES, server=False)), metadata)
