"""Ports of `outrider up`: those that the user names, else fixed ports, or the next free ports."""

import socket

from outrider.cli.failures import CommandFailed
from outrider.cli.local.up_settings import StackOptions
from outrider.wire.bind_errors import check_bindable

GRPC_PORT = 50051
HTTP_PORT = 8000
TRIED = 100
"""Number of consecutive ports that are tried."""


def check_ports(options: StackOptions) -> None:
    """Raises Unavailable where an address that the user named cannot be served on.

    `up` asks before it downloads and loads models, which may take long.
    """
    for what, setting, asked in (("gRPC", "bind", options.bind), ("HTTP", "http_bind", options.http_bind)):
        if bind := asked or options.overrides.text("orchestrator", setting):
            check_bindable(what, bind, "orchestrator", setting)


def free_address(first: int) -> str:
    """127.0.0.1 with port `first` or the next free port. Raises CommandFailed if no port is free."""
    for port in range(first, first + TRIED):
        if _is_free(port):
            return f"127.0.0.1:{port}"
    raise CommandFailed(
        f"ports {first} to {first + TRIED - 1} of 127.0.0.1 are all in use: give --bind and --http-bind",
        "UNAVAILABLE",
    )


def _is_free(port: int) -> bool:
    """Whether a server could listen on a port now, as servers do: without waiting for closed connections."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True
