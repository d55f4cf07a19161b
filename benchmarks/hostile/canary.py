"""Streams of an innocent tenant over both fronts, which a benchmark runs beside hostile inputs.

Started as `python -m benchmarks.hostile.canary GRPC HTTP KEY TARGET`. Decodes every prompt plainly first,
prints the line `ready`, then repeats its streams until it is ended. Each further line is a JSON array of
front, kind (`first`: the wait for the first token; `gap`: between two messages; `wrong`: another output, or
an error), the time of CLOCK_MONOTONIC in seconds, and seconds; of `wrong`, what was wrong.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from benchmarks.shared.heldout import load_prompts
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel

TOKENS = 120
PROMPT_TOKENS = 48
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0, "seed": 1}, {"temperature": 0.8, "seed": 2})


def say(*what: object) -> None:
    """Prints one line."""
    print(json.dumps(what), flush=True)


class GrpcCanary:
    """The stream over gRPC."""

    name = "grpc"

    def __init__(self, address: str, key: str) -> None:
        self._stub: Any = GenerationStub(open_channel(address))
        self._metadata = (("authorization", f"Bearer {key}"),)

    async def stream(self, ids: Sequence[int], plain: bool, kind: dict[str, Any]) -> AsyncIterator[list[int]]:
        """The token ids of each message."""
        start = pb.GenerateStart(max_tokens=TOKENS, seed=kind["seed"])
        start.ids.ids.extend(ids)
        start.sampling.temperature = kind["temperature"]
        start.sampling.ignore_eos = True
        start.speculation.enabled = not plain
        request = pb.GenerateRequest(start=start)
        async for response in self._stub.Generate(iter((request,)), metadata=self._metadata):
            if response.WhichOneof("body") == "tokens":
                yield list(response.tokens.ids)


class HttpCanary:
    """The stream over HTTP, each on a connection of its own."""

    name = "http"

    def __init__(self, address: str, key: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._key = host, int(port), key

    async def stream(self, ids: Sequence[int], plain: bool, kind: dict[str, Any]) -> AsyncIterator[list[int]]:
        """The token ids of each event. Raises RuntimeError for another status than 200."""
        request = {"prompt": list(ids), "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        request |= {"return_token_ids": True, "speculation": {"enabled": not plain}, **kind}
        body = json.dumps(request).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"HTTP answered {status!r}")
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(f"the stream ended in {event['error']}")
                    if got := [id_ for choice in event["choices"] for id_ in choice.get("token_ids") or ()]:
                        yield got
        finally:
            writer.close()


Canary = GrpcCanary | HttpCanary


async def repeat(canary: Canary, requests: list[tuple[Sequence[int], dict[str, Any], list[int]]]) -> None:
    """Repeats the requests, and tells of every message's time and of every wrong output."""
    for ids, kind, golden in itertools.cycle(requests):
        last, got, what = time.monotonic(), list[int](), "first"
        try:
            async for more in canary.stream(ids, False, kind):
                now = time.monotonic()
                say(canary.name, what, now, round(now - last, 5))
                last, what = now, "gap"
                got += more
            if got != golden:
                say(canary.name, "wrong", last, f"{got[:200]} in place of {golden[:200]}")
        except Exception as error:
            say(canary.name, "wrong", time.monotonic(), repr(error)[:300])
            await asyncio.sleep(0.2)


async def main(address: str, http: str, key: str, target: str) -> None:
    """Runs until it is cancelled."""
    prompts = [ids[:PROMPT_TOKENS] for ids in load_prompts(target, 3)]
    canaries: list[Canary] = [GrpcCanary(address, key), HttpCanary(http, key)]
    requests = []
    for ids, kind in itertools.product(prompts, KINDS):
        golden, drafted = [
            [id_ async for ids_ in canaries[0].stream(ids, plain, kind) for id_ in ids_]
            for plain in (True, False)
        ]
        if golden != drafted:
            raise SystemExit("the canary's output differs from plain decoding before any hostile input")
        requests.append((ids, kind, golden))
    print("ready", flush=True)
    await asyncio.gather(*(repeat(canary, requests) for canary in canaries))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
