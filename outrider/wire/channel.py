"""Options of servers and channels, in one place because both ends must agree.

A peer that was killed is noticed at once by its closed socket. One that is frozen, or behind a cut line, is
noticed only by pings: they go out every PING_MS, must be answered within PING_TIMEOUT_MS, and the server
allows that rate (gRPC's default allows one in five minutes and then hangs up with too_many_pings).
"""

import grpc
import grpc.aio

PING_MS = 2_000
PING_TIMEOUT_MS = 1_000
ALLOWED_PING_MS = 1_000
DEFAULT_MESSAGE_MB = 32

Options = list[tuple[str, int | str]]


def _common(max_message_mb: int) -> Options:
    size = max_message_mb * 1024 * 1024
    return [
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_mb: int = DEFAULT_MESSAGE_MB) -> Options:
    """For `grpc.aio.server`: a port that is taken is an error, never shared with its owner."""
    return [
        *_common(max_message_mb),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", ALLOWED_PING_MS),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(max_message_mb: int = DEFAULT_MESSAGE_MB) -> Options:
    """For channels between the project's own processes: no proxy, quick to try a lost peer again."""
    return [
        *_common(max_message_mb),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def open_channel(address: str, max_message_mb: int = DEFAULT_MESSAGE_MB) -> grpc.aio.Channel:
    """A channel to host:port; nothing is dialled before the first call."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_mb))


def open_sync_channel(address: str, max_message_mb: int = DEFAULT_MESSAGE_MB) -> grpc.Channel:
    """The same for callers without an event loop."""
    return grpc.insecure_channel(address, options=channel_options(max_message_mb))
