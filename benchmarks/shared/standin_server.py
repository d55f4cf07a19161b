"""How a stand-in for a service, started by a benchmark as a process of its own, serves and ends."""

import asyncio
import sys

import grpc.aio


async def serve_until_stdin_ends(server: grpc.aio.Server, grace_s: float) -> None:
    """Serves on a free port of this machine, prints the address as the first line, and stops when stdin ends.

    Args:
        grace_s: seconds that calls in progress get to end.
    """
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace_s)
