"""Resolves peers that stand for several addresses: dns:NAME:PORT is every present address of the name."""

import asyncio
import socket

from outrider.runtime.settings import DNS


async def resolve(peer: str) -> tuple[str, ...]:
    """Every address of dns:NAME:PORT, sorted.

    Waits as long as the system's resolver does, so that a resolver that hangs blocks one thread, not many.
    Raises OSError where the name has no address, UnicodeError where it cannot be a host's name.
    """
    host, _, port = peer.removeprefix(DNS).rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return tuple(sorted({_address(str(entry[4][0]), port) for entry in found}))


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
