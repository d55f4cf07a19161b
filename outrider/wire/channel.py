"""Options of servers and channels, in one place because both ends must agree.

A peer that was killed is noticed at once by its closed socket. One that is frozen, or behind a cut line, is
noticed only by pings, which go out every PING_MS. Whoever dials gives up soon, to try elsewhere; a server is
patient with those who dialled it, as a stalled client would lose its request.

What bounds a message is its receiver: a process's setting is what its server takes from those who dial it,
and what its channels take as an answer. Nobody bounds what it sends: a message that is too large is refused
by the one who knows the bound, always in the same words.

A burst of calls is answered by the service, not by gRPC, which would cancel without a word what comes beyond
1,000 at once.

Servers take pings at any rate. By default they hang up with too_many_pings over more than one in five
minutes, and any limit is wrong: gRPC's own bandwidth probes count too, and come in bunches when it is busy.
"""

import grpc
import grpc.aio

from outrider.wire.renewing import RenewingChannel
from outrider.wire.tls import Certificates, Pem, channel_credentials, role_name

PING_MS = 2_000
DIALLER_PATIENCE_MS = 1_000
SERVER_PATIENCE_MS = 10_000
DEFAULT_MESSAGE_MB = 32
MOST_PENDING = 100_000
"""Calls that a server has not looked at yet."""

Options = list[tuple[str, int | str]]


def _common(max_message_mb: int, patience_ms: int) -> Options:
    # Whoever has little patience asks often too: a peer is lost for the sum of both before that is known.
    ping_ms = PING_MS if patience_ms >= DIALLER_PATIENCE_MS else patience_ms
    return [
        ("grpc.max_receive_message_length", max_message_mb * 1024 * 1024),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_mb: int = DEFAULT_MESSAGE_MB) -> Options:
    """For `grpc.aio.server`: a port that is taken is an error, never shared with its owner."""
    return [
        *_common(max_message_mb, SERVER_PATIENCE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),  # no limit
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
    ]


def channel_options(
    max_message_mb: int = DEFAULT_MESSAGE_MB, patience_ms: int = DIALLER_PATIENCE_MS
) -> Options:
    """For channels to the project's own processes: no proxy, quick to try a lost peer again.

    `patience_ms` is how long a ping may go unanswered before the peer counts as lost.
    """
    return [
        *_common(max_message_mb, patience_ms),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def open_channel(
    address: str,
    max_message_mb: int = DEFAULT_MESSAGE_MB,
    *,
    patience_ms: int = DIALLER_PATIENCE_MS,
    certificates: Certificates | None = None,
    role: str = "",
) -> grpc.aio.Channel:
    """A channel to host:port; nothing is dialled before the first call.

    Args:
        certificates: what to show and whom to believe; calls made after a change of the files use what they
            hold then. None: plain.
        role: which the peer's certificate must name; empty: it must name the host.
    """
    options = channel_options(max_message_mb, patience_ms)
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    if role:
        options.append(("grpc.ssl_target_name_override", role_name(role)))

    def make(pem: Pem) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, channel_credentials(pem), options=options)

    return RenewingChannel(certificates, make)


def open_sync_channel(
    address: str,
    max_message_mb: int = DEFAULT_MESSAGE_MB,
    *,
    patience_ms: int = DIALLER_PATIENCE_MS,
    certificates: Certificates | None = None,
    role: str = "",
) -> grpc.Channel:
    """The same for callers without an event loop; it shows to its end what the files hold now."""
    options = channel_options(max_message_mb, patience_ms)
    if certificates is None:
        return grpc.insecure_channel(address, options=options)
    if role:
        options.append(("grpc.ssl_target_name_override", role_name(role)))
    return grpc.secure_channel(address, channel_credentials(certificates.current()), options=options)
