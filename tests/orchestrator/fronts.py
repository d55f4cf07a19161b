"""An orchestrator as its process has it, on this loop: its port, its certificates, its keys."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from orchestrator.front.tls import grpc_listening
from orchestrator.service import build
from orchestrator.settings import OrchestratorSettings
from outrider.runtime.serve import serve
from outrider.wire.keys import key_digest, new_key


@asynccontextmanager
async def orchestrator(**settings: Any) -> AsyncIterator[dict[str, str]]:
    """The object that a ready orchestrator prints. Raises AssertionError where it gives up."""
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    parsed = OrchestratorSettings(**{"http_bind": "127.0.0.1:0", "grace_s": 0.0, **settings})
    task = asyncio.create_task(serve("orchestrator", build, parsed, said.put_nowait, grpc_listening))
    try:
        announced = await said.get()
        assert "error" not in announced, announced
        yield announced
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def connected(
    url: str, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to an HTTP front."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    try:
        yield reader, writer
    finally:
        writer.close()


async def soon(happened: Callable[[], Awaitable[Any]]) -> None:
    """Waits until `happened` returns something true."""
    async with asyncio.timeout(60):
        while True:
            if await happened():
                return
            await asyncio.sleep(0.02)


def write_keys(path: Path, tenants: Sequence[str], **quotas: int) -> list[str]:
    """Writes a key file with a key for each tenant, all with these quotas; returns the keys."""
    keys = [new_key() for _ in tenants]
    lines = [
        json.dumps({"sha256": key_digest(key), "tenant": tenant, **quotas})
        for key, tenant in zip(keys, tenants, strict=True)
    ]
    path.write_text("\n".join(lines))
    return keys
