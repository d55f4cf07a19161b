"""Certificates of both ends, in files that may be replaced while a process runs.

Inside, each process shows a certificate of one authority and asks for one; the names in it say which roles it
plays, not where it runs: processes are dialled by addresses that come and go. At the front door it is the
host's name that counts, as everywhere.
"""

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from outrider.wire.reloading import EVERY_S, Reloaded
from speculative.errors import InvalidRequest

INSIDE = "outrider.internal"
"""What the names of roles end with; no DNS server need know it."""
SOURCE = "source"
"""The name that every process carries to which verifiers go for drafts."""


def role_name(role: str) -> str:
    """How a certificate says that its holder plays the role."""
    return f"{role}.{INSIDE}"


@dataclass(frozen=True, slots=True)
class Pem:
    """One end's certificate with those that lead to its authority, its key, and who signs for the other end;
    empty where there is none."""

    chain: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Files:
    """Where they lie, and how settings call them.

    Args:
        server: whether the certificate is shown to those who dial, or to those who are dialled.
        own_ca: whether `ca` signs for this end, too.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    names: tuple[str, str, str] = ("tls_cert", "tls_key", "tls_ca")
    server: bool = True
    own_ca: bool = False


class Certificates:
    """What the files hold, of now. Raises InvalidRequest, naming the file and what to do, where that is
    nothing that could be used; once it is in use, such a change is logged and what was there goes on."""

    def __init__(self, files: Files, *, every_s: float = EVERY_S) -> None:
        self._files = files
        paths = zip(files.names, (files.cert, files.key, files.ca), strict=True)
        self._paths = {name: path for name, path in paths if path is not None}
        self._pem = Reloaded(self._paths, self._checked, every_s=every_s)

    def current(self) -> Pem:
        """The same object until the files change."""
        return self._pem.current()

    def _checked(self, contents: Mapping[str, bytes]) -> Pem:
        cert, key, ca = self._files.names
        pem = Pem(contents.get(cert, b""), contents.get(key, b""), contents.get(ca, b""))
        if ca in contents:
            self._load(ca, pem.ca)
        if cert in contents:
            self._load(cert, pem.chain)
            self._rehearse(pem)
        return pem

    def _load(self, name: str, pem: bytes) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
        except (ssl.SSLError, ValueError) as error:
            raise self._wrong(name, "has no certificate in PEM; put one there") from error

    def _rehearse(self, pem: Pem) -> None:
        """One handshake in memory, in which the other end looks at what this one shows."""
        cert, key, ca = self._files.names
        shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self._files.server else ssl.PROTOCOL_TLS_CLIENT)
        looks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if self._files.server else ssl.PROTOCOL_TLS_SERVER)
        shows.check_hostname = looks.check_hostname = False
        try:
            load_pair(shows, pem)
            load_pair(looks, pem)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", "") or "not readable, or encrypted"
            raise self._wrong(
                key, f"has no key, without a passphrase, that belongs to {cert} ({reason}); write both anew"
            ) from error
        shows.verify_mode, looks.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
        if self._files.own_ca:
            looks.load_verify_locations(cadata=pem.ca.decode())
        else:  # whoever signed it; that it has not run out can be seen all the same
            looks.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            looks.load_verify_locations(cadata=pem.chain.decode())
        try:
            _shake(*((looks, shows) if self._files.server else (shows, looks)))
        except ssl.SSLCertVerificationError as error:
            known = f" by {ca}" if self._files.own_ca else ""
            raise self._wrong(
                cert, f"is not accepted{known}: {error.verify_message}; issue a new certificate"
            ) from error

    def _wrong(self, name: str, why: str) -> InvalidRequest:
        return InvalidRequest(f"{name}: {str(self._paths[name])!r} {why}")


def load_pair(context: ssl.SSLContext, pem: Pem) -> None:
    """Certificate and key into a context: those that were checked, whatever has become of the files.

    Raises ssl.SSLError, and ValueError where the key is encrypted.
    """
    with _as_file(pem.chain) as chain, _as_file(pem.key) as key:
        context.load_cert_chain(chain, key, password=_no_passphrase)


def server_credentials(certificates: Certificates, *, clients: bool) -> grpc.ServerCredentials:
    """For a server's port; each new connection is shown what the files hold then.

    `clients`: whether those who dial must show a certificate, too.
    """
    shown = certificates.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        now = certificates.current()
        if now is shown:
            return None  # no change
        shown = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        fetch,  # type: ignore[arg-type]  # the stubs leave None out, which the library documents
        require_client_authentication=clients,
    )


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """For a channel; good for as long as the certificate is."""
    return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.chain or None)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], root_certificates=pem.ca or None)


def _shake(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """The library loads pairs from files alone; this one is in memory, and nobody else's."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted")
