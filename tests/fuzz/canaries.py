"""Streams of another tenant that run beside hostile inputs, over both fronts: ids and gaps are compared.

A gap is measured in processor time of the server's event loop: what the loop did meanwhile for others. So a
busy machine does not make gaps longer.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from outrider.client import AsyncClient
from tests.fuzz.front_clients import HttpFuzzClient
from tests.fuzz.fuzzed_server import FuzzedServer, id_at

TOKENS = 96
HUNG_S = 300.0
"""Seconds after which a stream that has not ended counts as hung, on a machine that has more to do."""
PROMPTS = ([5, 9, 30], [7] * 40, [4000, 1, 2])


@dataclass(slots=True)
class Seen:
    """What the canaries have seen so far."""

    streams: int = 0
    longest_gap_s: float = 0.0
    """Longest wait for a message, in seconds of processor time of the server's event loop."""
    wrong: list[str] = field(default_factory=list)


class Canaries:
    """Repeats streams on a thread of its own; a context manager that ends them."""

    def __init__(self, server: FuzzedServer) -> None:
        self._server = server
        self.seen = Seen()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="canaries")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()

    async def _run(self) -> None:
        async with AsyncClient(self._server.address, api_key=self._server.keys["canary"]) as client:
            await asyncio.gather(self._repeat("grpc", client), self._repeat("http", client))

    async def _repeat(self, front: str, client: AsyncClient) -> None:
        number = 0
        while not self._stopping.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            expected = [id_at(prompt, position) for position in range(len(prompt), len(prompt) + TOKENS)]
            got, last = list[int](), self._server.loop_seconds()
            try:
                stream = over_grpc(client, prompt) if front == "grpc" else over_http(self._server, prompt)
                async with asyncio.timeout(HUNG_S):
                    async for more in stream:
                        now = self._server.loop_seconds()
                        self.seen.longest_gap_s = max(self.seen.longest_gap_s, now - last)
                        got, last = [*got, *more], now
            except Exception as error:
                self.seen.wrong.append(f"{front}: {error!r}")
            if got != expected:
                self.seen.wrong.append(f"{front}: {got} in place of {expected}")
            self.seen.streams += 1
            number += 1


async def over_grpc(client: AsyncClient, prompt: list[int]) -> AsyncIterator[list[int]]:
    """The ids of each message of a stream."""
    async with client.stream(ids=prompt, max_tokens=TOKENS, ignore_eos=True) as stream:
        async for delta in stream:
            yield list(delta.ids)


async def over_http(server: FuzzedServer, prompt: list[int]) -> AsyncIterator[list[int]]:
    """The ids of each event of a stream."""
    host, _, port = server.http.rpartition(":")
    request = {"prompt": prompt, "max_tokens": TOKENS, "stream": True, "return_token_ids": True}
    body = json.dumps(request | {"ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(HttpFuzzClient.head_of("/v1/completions", len(body), server.keys["canary"]) + body)
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    if choice.get("token_ids"):
                        yield choice["token_ids"]
    finally:
        writer.close()
