"""Options of servers and channels, in one place because both ends must agree.

The closed socket of a killed peer shows at once. A peer that is frozen, or behind a cut line, is noticed only
by pings, sent every PING_MS. A client gives up soon, to try another peer. A server is patient with clients:
otherwise a stalled client would lose its request.

The receiver bounds the size of a message: a process's setting bounds the requests that its server accepts and
the responses that its channels accept. Senders have no bound, so the process that knows the bound refuses a
message that is too large, always in the same words.

The service answers a burst of calls. gRPC itself would cancel, without a reason, all calls beyond 1,000 at
once.

Servers accept pings at any rate. By default gRPC hangs up with too_many_pings after a second ping within five
minutes, and any limit is wrong: gRPC's own bandwidth probes count too, and come in bunches on a busy server.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from outrider.wire.incoming.answers import CheckedChannel
from outrider.wire.renewing import RenewingChannel
from outrider.wire.tls import Certificates, Pem, channel_credentials, role_name

PING_MS = 2_000
"""Milliseconds between two pings of an idle connection."""
QUICK_PING_MS = 250
"""The same where a peer has less than DIALLER_PATIENCE_MS. An answer's messages come more often, so a ping
goes out only in silence."""
DIALLER_PATIENCE_MS = 1_000
"""Milliseconds that a server may leave a client's ping unanswered."""
SERVER_PATIENCE_MS = 10_000
"""Milliseconds that a client may leave a server's ping unanswered."""
DEFAULT_MESSAGE_MB = 8
"""The largest message that is accepted, in MiB. gRPC hands a message over in one piece, on the event loop:
each MiB costs the loop 1 to 2 ms. `outrider.wire.incoming.hand_over` puts pauses between such messages."""
INTERRUPTED_S = 1.0
"""Seconds that closing gets after an interrupt."""
MOST_PENDING = 100_000
"""Largest number of calls that wait for a server to accept them."""

FIXED_BYTES = 256 * 1024
"""More bytes than all fields of a request take that do not grow with the context."""


def least_message_mb(context: int, vocabulary_size: int) -> int:
    """The least `max_message_mb`, in MiB, with which every request of one choice to this context arrives.

    An Open has the context's tokens once, and up to as many of the texts to copy from.
    """
    id_bytes = max(1, -(-max(0, vocabulary_size - 1).bit_length() // 7))
    return -(-(2 * context * id_bytes + FIXED_BYTES) // 2**20)


Options = list[tuple[str, int | str]]


def _common(max_message_mb: int, patience_ms: int) -> Options:
    # A lost peer is noticed after the sum of both times, so little patience asks for frequent pings too.
    ping_ms = PING_MS if patience_ms >= DIALLER_PATIENCE_MS else QUICK_PING_MS
    return [
        ("grpc.max_receive_message_length", max_message_mb * 1024 * 1024),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_mb: int = DEFAULT_MESSAGE_MB) -> Options:
    """Options for `grpc.aio.server`: a port that is taken is an error, never shared with its owner."""
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
    """Options for channels to the project's own processes: no proxy, quick reconnects to a lost peer.

    After `patience_ms` without an answer to a ping the peer counts as lost.
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
    """A channel to host:port; nothing is dialled before the first call. Its calls raise MalformedAnswer.

    Args:
        certificates: certificate to show and authority to trust; calls made after a change of the files use
            the new contents. None: no encryption.
        role: the role that the peer's certificate must name; empty: the certificate must name the host.
    """
    options = channel_options(max_message_mb, patience_ms)
    if certificates is None:
        return CheckedChannel(grpc.aio.insecure_channel(address, options=options), address)
    if role:
        options.append(("grpc.ssl_target_name_override", role_name(role)))

    def make(pem: Pem) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, channel_credentials(pem), options=options)

    return CheckedChannel(RenewingChannel(certificates, make), address)


def open_sync_channel(
    address: str,
    max_message_mb: int = DEFAULT_MESSAGE_MB,
    *,
    patience_ms: int = DIALLER_PATIENCE_MS,
    certificates: Certificates | None = None,
    role: str = "",
) -> grpc.Channel:
    """A channel for callers without an event loop; it uses the files' present contents until it closes."""
    options = channel_options(max_message_mb, patience_ms)
    if certificates is None:
        return grpc.insecure_channel(address, options=options)
    if role:
        options.append(("grpc.ssl_target_name_override", role_name(role)))
    return grpc.secure_channel(address, channel_credentials(certificates.current()), options=options)


@contextmanager
def sync_channel(address: str, **options: Any) -> Iterator[grpc.Channel]:
    """A channel as `open_sync_channel` opens it, which closes as the block ends."""
    channel, left_by = open_sync_channel(address, **options), None
    try:
        yield channel
    except BaseException as error:
        left_by = error
        raise
    finally:
        close_after(left_by, channel.close)


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Calls `close` for a caller without an event loop, whose block ended with `error`; None: without one.

    An interrupt may come while the main thread takes one of gRPC's locks. That lock is then never released,
    and closing a channel waits for it in vain. So after an interrupt a thread closes, and gets a second.
    """
    if error is None or isinstance(error, Exception):
        close()
    else:
        closing = threading.Thread(target=close, name="closes after an interrupt", daemon=True)
        closing.start()
        closing.join(INTERRUPTED_S)
