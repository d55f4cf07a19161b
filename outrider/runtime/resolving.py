"""Names that stand for several addresses: dns:NAME:PORT is each address that the name has at the time."""

import asyncio
import socket

from outrider.runtime.settings import DNS


async def resolve(peer: str) -> tuple[str, ...]:
    """Every address of dns:NAME:PORT, sorted.

    Waits for as long as the system's resolver does, so that a resolver that hangs holds one thread, not many.
    Raises OSError where it finds none, UnicodeError where the name can be none.
    """
    host, _, port = peer.removeprefix(DNS).rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return tuple(sorted({_address(str(entry[4][0]), port) for entry in found}))


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
