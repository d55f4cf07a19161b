"""How commands that look after services show an operator's certificate to them."""

from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.access import Ca, Cert, CertKey

if TYPE_CHECKING:
    import grpc

PATIENCE_MS = 10_000
_GIVEN: ContextVar[tuple[str, str, str]] = ContextVar("given", default=("", "", ""))


def shown(ca: Ca = "", cert: Cert = "", cert_key: CertKey = "") -> None:
    """Take the options that stand before a command's name."""
    _GIVEN.set((ca, cert, cert_key))


def channel_to(role: str, address: str) -> "grpc.Channel":
    """Plain where no certificates were given; else the peer's must name the role. Raises InvalidRequest."""
    from outrider.client.endpoints import credentials_of
    from outrider.wire.channel import open_sync_channel

    ca, cert, cert_key = (Path(path) if path else None for path in _GIVEN.get())
    certificates = credentials_of(None, ca, cert, cert_key).certificates
    return open_sync_channel(address, patience_ms=PATIENCE_MS, certificates=certificates, role=role)
