"""Says why a process cannot serve on an address, and which setting to change.

gRPC reports a failed bind without its reason. So the address is bound once more here, by a plain socket, and
the reason is that of the operating system.
"""

import errno
import socket

from speculative.errors import Unavailable


def bind_failure(what: str, bind: str, role: str, setting: str, error: Exception) -> Unavailable:
    """The error to raise for a failed bind.

    Args:
        what: the thing that would be served there, such as "HTTP".
        bind: host:port that could not be bound.
        role: the service's role.
        setting: name of the setting that holds `bind`.
        error: the error of the server that tried.
    """
    found = error if isinstance(error, OSError) else _retried(bind)
    names = f"--{setting.replace('_', '-')} or OUTRIDER_{role.upper()}__{setting.upper()}"
    return Unavailable(
        f"cannot serve {what} on {bind}: {_reason(bind, found or error)}, "
        f"or give the {role} another {setting} ({names}; port 0 picks a free port)"
    )


def check_bindable(what: str, bind: str, role: str, setting: str) -> None:
    """Raises Unavailable where nothing can be served on an address now; arguments as in `bind_failure`."""
    if (error := _retried(bind)) is not None:
        raise bind_failure(what, bind, role, setting, error)


def _retried(bind: str) -> OSError | None:
    """The operating system's error for this address; None where the address can be bound now."""
    host, _, port = bind.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None


def _reason(bind: str, error: Exception) -> str:
    """What is wrong, and what to do about it other than choosing another address."""
    host, _, port = bind.rpartition(":")
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} has no address here: correct the name"
    match error.errno if isinstance(error, OSError) else None:
        case errno.EADDRINUSE:
            return f"another process uses port {port} already: stop that process"
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}: use one of its own addresses or 0.0.0.0"
        case errno.EAFNOSUPPORT:
            return f"this machine has no addresses of the kind of {host}: use 0.0.0.0 or 127.0.0.1"
        case errno.EACCES:
            return f"this user may not use port {port}: start the process with the right to"
    return f"{error}: correct the cause"
