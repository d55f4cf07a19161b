"""TLS of the HTTP front, whose certificate may be replaced while it serves."""

import ssl
from collections.abc import Callable

import uvicorn

from outrider.wire.tls import Certificates, Pem, load_pair

ContextFactory = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]


def serving(certificates: Certificates) -> ContextFactory:
    """What makes uvicorn's context: each new connection is shown what the files hold then."""
    made: dict[int, ssl.SSLContext] = {}

    def newest() -> ssl.SSLContext:
        pem = certificates.current()
        if (context := made.get(id(pem))) is None:
            made.clear()
            context = made[id(pem)] = _context(pem)
        return context

    def turn(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = newest()

    def make(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        first = _context(certificates.current())
        first.sni_callback = turn  # type: ignore[assignment]  # called for every handshake, named or not
        return first

    return make


def _context(pem: Pem) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, pem)
    if pem.ca:
        context.load_verify_locations(cadata=pem.ca.decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context
