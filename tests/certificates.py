"""Certificates for tests, in files as operators keep them."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trustme

from outrider.wire.tls import role_name

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """A certificate authority that writes its own and the issued certificates into one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(self._ca.cert_pem.bytes())

    def issue(self, name: str, names: Sequence[str], **how: Any) -> tuple[Path, Path]:
        """Writes NAME.crt and NAME.key for these host names, over older ones, and returns their paths."""
        made = self._ca.issue_cert(*names, key_type=trustme.KeyType.ECDSA, **how)
        chain, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        chain.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        key.write_bytes(made.private_key_pem.bytes())
        return chain, key

    def role(self, *roles: str, **how: Any) -> dict[str, Path]:
        """TLS settings of a process with these roles."""
        cert, key = self.issue(roles[0], [role_name(role) for role in roles], **how)
        return {"tls_cert": cert, "tls_key": key, "tls_ca": self.ca}

    def front(self) -> dict[str, Path]:
        """TLS settings of an orchestrator's front that clients on this machine dial."""
        cert, key = self.issue("front", ["localhost", "127.0.0.1"])
        return {"front_cert": cert, "front_key": key}
