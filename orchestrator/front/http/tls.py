"""TLS of the HTTP front, whose certificate may be replaced while it serves."""

import ssl
from collections.abc import Callable

import uvicorn

from outrider.wire.tls import Certificates, Pem, load_pair

ContextFactory = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]


def serving(certificates: Certificates) -> ContextFactory:
    """What makes uvicorn's context: each new connection is shown what the files hold then."""
    shown = certificates.current()
    newest = _context(shown)

    def turn(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal shown, newest
        if (pem := certificates.current()) is not shown:
            shown, newest = pem, _context(pem)
        connection.context = newest

    def make(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        first = _context(shown)
        first.sni_callback = turn  # called whether a name was sent or not
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
