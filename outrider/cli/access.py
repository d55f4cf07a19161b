"""Credentials that commands show to services: API keys and certificates of clients and of operators."""

import os
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from outrider.cli.failures import usage

if TYPE_CHECKING:
    import grpc

    from outrider.client import Client

API_KEY = "OUTRIDER_API_KEY"
"""Environment variable with the API key where no file holds it: others can see a process's arguments."""
PATIENCE_MS = 10_000
"""Milliseconds that a service may leave a ping of an operator's command unanswered."""

ApiKeyFile = Annotated[str, typer.Option(help="File with the API key. Default: $OUTRIDER_API_KEY.")]
Ca = Annotated[str, typer.Option(help="Connect with TLS and trust the certificates in this file.")]
Cert = Annotated[str, typer.Option(help="With --ca: file with the certificate to show.")]
CertKey = Annotated[str, typer.Option(help="With --cert: file with the key of the certificate.")]


class Access(NamedTuple):
    """Paths of the files with a client's credentials; an empty path stands for none."""

    api_key_file: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""

    def client(self, address: str) -> "Client":
        """A client of the orchestrator at host:port. Raises OutriderError, CommandFailed."""
        from outrider.client import Client

        ca, cert, cert_key = (path or None for path in (self.ca, self.cert, self.cert_key))
        return Client(address, api_key=self.api_key(), ca=ca, cert=cert, cert_key=cert_key)

    def api_key(self) -> str | None:
        """The API key; None without one. Raises CommandFailed."""
        if not self.api_key_file:
            return os.environ.get(API_KEY) or None
        try:
            return Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise usage(f"--api-key-file {self.api_key_file!r} cannot be read: {error}") from error


NOTHING_TO_SHOW = Access()

_OPERATOR: ContextVar[tuple[str, str, str]] = ContextVar("operator", default=("", "", ""))


def take_operator_certificate(ca: Ca = "", cert: Cert = "", cert_key: CertKey = "") -> None:
    """Callback of a group of commands: keeps the options that stand before a command's name."""
    _OPERATOR.set((ca, cert, cert_key))


def operator_channel(role: str, address: str) -> "AbstractContextManager[grpc.Channel]":
    """A channel for a block, to a service of this role, with the operator's certificate where one was given.

    Not encrypted without certificates; with them the service's certificate must name the role. Raises
    InvalidRequest, and CommandFailed where the address cannot be dialled.
    """
    from outrider.client.endpoints import credentials_of
    from outrider.wire.channel import sync_channel
    from outrider.wire.names import is_host_port

    if not is_host_port(address.removeprefix("dns:").removeprefix("///")):
        raise usage(
            f"--address {address[:80]!r} is not host:port with a port from 1 to 65535; give the worker's"
        )
    ca, cert, cert_key = (Path(path) if path else None for path in _OPERATOR.get())
    certificates = credentials_of(None, ca, cert, cert_key).certificates
    return sync_channel(address, patience_ms=PATIENCE_MS, certificates=certificates, role=role)
