"""How commands are let in by an orchestrator: what they show, and whom they believe."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from outrider.cli.failures import usage

if TYPE_CHECKING:
    from outrider.client import Client

API_KEY = "OUTRIDER_API_KEY"
"""The variable that holds a key where no file does: arguments can be seen by others."""

ApiKeyFile = Annotated[str, typer.Option(help="Holds the API key. Default: $OUTRIDER_API_KEY.")]
Ca = Annotated[str, typer.Option(help="A file with whom to believe: connect with TLS.")]
Cert = Annotated[str, typer.Option(help="With --ca: a file with the certificate to show.")]
CertKey = Annotated[str, typer.Option(help="With --cert: a file with its key.")]


class Access(NamedTuple):
    """How the client is let in; empty: not given."""

    api_key_file: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""

    def client(self, address: str) -> "Client":
        """Raises OutriderError, CommandFailed."""
        from outrider.client import Client

        ca, cert, cert_key = (path or None for path in (self.ca, self.cert, self.cert_key))
        return Client(address, api_key=self._api_key(), ca=ca, cert=cert, cert_key=cert_key)

    def _api_key(self) -> str | None:
        if not self.api_key_file:
            return os.environ.get(API_KEY) or None
        try:
            return Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise usage(f"--api-key-file {self.api_key_file!r} cannot be read: {error}") from error


NOTHING_TO_SHOW = Access()
