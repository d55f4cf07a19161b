"""Certificates of both ends, in files that may be replaced while a process runs.

Inside a deployment, each process shows a certificate of one authority and requires one of its peer. The names
in a certificate are the roles of its process, not its host, as the addresses of processes come and go. At the
front door the certificate names the host, as usual.
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
"""Suffix of the names of roles in certificates; no DNS server needs to know it."""
SOURCE = "source"
"""Role in the certificates of all processes that verifiers get drafts from."""


def role_name(role: str) -> str:
    """The name in a certificate of the role's processes."""
    return f"{role}.{INSIDE}"


@dataclass(frozen=True, slots=True)
class Pem:
    """PEM contents of one end: certificate chain, its key, and the authority of the other end, if any."""

    chain: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of the PEM files, and the names of the settings that gave them.

    Args:
        server: whether the certificate is shown by a server to its clients; False: by a client.
        own_ca: whether `ca` also signs the certificate of this end.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    names: tuple[str, str, str] = ("tls_cert", "tls_key", "tls_ca")
    server: bool = True
    own_ca: bool = False


class Certificates:
    """The present contents of the PEM files, checked.

    Raises InvalidRequest where the files cannot be used at first, naming the file and what to do. A later
    change to unusable contents is logged, and the former contents stay in use.
    """

    def __init__(self, files: Files, *, every_s: float = EVERY_S) -> None:
        self._files = files
        paths = zip(files.names, (files.cert, files.key, files.ca), strict=True)
        self._paths = {name: path for name, path in paths if path is not None}
        self._pem = Reloaded(self._paths, self._checked, every_s=every_s)

    def current(self) -> Pem:
        """The contents of the files; the same object until they change."""
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
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise self._wrong(name, "has no certificate in PEM; put one there") from error

    def _rehearse(self, pem: Pem) -> None:
        """Runs one handshake in memory, in which the other end checks the certificate of this end."""
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
        else:  # the authority is unknown here, but an expired certificate is found all the same
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
    """Loads the checked certificate and key into a context, without reading their files again.

    Raises ssl.SSLError, and ValueError where the key is encrypted.
    """
    with _as_file(pem.chain) as chain, _as_file(pem.key) as key:
        context.load_cert_chain(chain, key, password=_no_passphrase)


def server_credentials(certificates: Certificates, *, clients: bool) -> grpc.ServerCredentials:
    """Credentials of a server's port; each new connection gets the files' contents at that moment.

    `clients`: whether clients must show a certificate too.
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
    """Credentials of a channel, valid as long as the certificate is."""
    return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.chain or None)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], root_certificates=pem.ca or None)


def _shake(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Runs a handshake between two contexts in memory. Raises ssl.SSLError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Path of an in-memory file with the data, as the ssl module loads key pairs only from files."""
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _no_passphrase() -> str:
    raise ValueError("the key is encrypted")
