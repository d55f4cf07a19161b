"""What a session costs: how many are opened in a second, and the memory of one that waits for its client.

Run as `outrider bench sessions --json`. docs/figures.md says what each field means.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from envelope import REPOSITORY, print_result
from redis_server import RedisServer
from stack import Stack
from streams import quantile

from outrider.client import AsyncClient
from outrider.client.options import build_request
from outrider.runtime.children import reserved_address
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel

PARKED = "outrider_verifier_sessions_parked"
COMMITTED = "outrider_verifier_committed_total"
PARK_S = 300.0
AT_ONCE = 32
FIRST = 4 * AT_ONCE
PROMPT = 32
"""Ids of each prompt; no two begin alike."""


def prompt(number: int) -> list[int]:
    """Of a session: its own from the first id on."""
    return [5 + (number * 31 + place * (number % 97 + 3)) % 4000 for place in range(PROMPT)]


async def opened(address: str, count: int) -> dict[str, Any]:
    """So many sessions of one id each, AT_ONCE at a time."""
    waits: list[float] = []
    numbers = iter(range(count))

    async def ask(client: AsyncClient) -> None:
        for number in numbers:
            began = time.perf_counter()
            await client.generate(ids=prompt(number), max_tokens=1, speculation=False)
            waits.append((time.perf_counter() - began) * 1000)

    async with AsyncClient(address) as client:
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))  # the first ones warm everything up
        waits.clear()
        numbers = iter(range(count, 2 * count))
        began = time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))
        seconds = time.perf_counter() - began
    return {
        "opened_per_second": round(count / seconds, 1),
        "open_ms": {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99)},
    }


async def leave(address: str, numbers: range) -> None:
    """Sessions that may be resumed, whose clients are gone after their first ids."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(stub: Any, number: int) -> None:
        request = build_request(None, {"ids": prompt(number), "max_tokens": 500, "ignore_eos": True})
        request.start.resumable = True
        async with limit:
            call = stub.Generate(iter((request,)))
            async for response in call:
                if response.HasField("tokens"):
                    break
            call.cancel()

    async with open_channel(address) as channel:
        stub = GenerationStub(channel)
        await asyncio.gather(*(one(stub, number) for number in numbers))


def parked_memory(stack: Stack, redis: RedisServer, count: int) -> dict[str, Any]:
    """KiB that each process has grown by for each session that waits, and how many ids such a session has.

    The first ones are not counted: they warm everything up.
    """
    asyncio.run(leave(stack.address, range(100_000, 100_000 + FIRST)))
    _wait_parked(stack, FIRST)
    pids = {process["role"]: process["pid"] for process in stack.processes} | {"redis": redis.pid}
    before = {role: resident_kb(pid) for role, pid in pids.items()}
    committed = stack.metric("verifier", COMMITTED)
    asyncio.run(leave(stack.address, range(200_000, 200_000 + count)))
    _wait_parked(stack, FIRST + count)
    grown = {role: round((resident_kb(pid) - before[role]) / count, 1) for role, pid in pids.items()}
    ids = PROMPT + (stack.metric("verifier", COMMITTED) - committed) / count
    return {"parked": count, "parked_kb": grown, "parked_ids": round(ids, 1)}


def _wait_parked(stack: Stack, count: int) -> None:
    ends = time.monotonic() + PARK_S
    while stack.metric("verifier", PARKED) < count:
        if time.monotonic() > ends:
            raise SystemExit(f"only {stack.metric('verifier', PARKED):g} of {count} sessions were parked")
        time.sleep(0.1)


def resident_kb(pid: int) -> int:
    """Memory of a process that is in RAM now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def parse() -> argparse.Namespace:
    """Flags; the defaults are the figures of the docs."""
    parser = argparse.ArgumentParser(prog="outrider bench sessions", description=__doc__)
    parser.add_argument("--target", default=str(REPOSITORY / "models" / "target"))
    parser.add_argument("--opened", type=int, default=1000, help="sessions to open")
    parser.add_argument("--parked", type=int, default=500, help="sessions to leave waiting")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry")
    return parser.parse_args()


def main() -> None:
    """Start everything, measure, print."""
    settings = parse()
    started = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as held:
        redis = RedisServer(held.enter_context(reserved_address()))
        held.callback(redis.stop, 5.0)
        redis.wait_ready()
        variables = {
            "OUTRIDER_ORCHESTRATOR__STORE": "redis",
            "OUTRIDER_ORCHESTRATOR__REDIS_URL": f"redis://{redis.address}",
            "OUTRIDER_VERIFIER__MAX_SESSIONS": str(settings.parked + 2 * FIRST),
            "OUTRIDER_VERIFIER__ORPHAN_GRACE_S": "0.2",
        }
        stack = held.enter_context(Stack(settings.target, "none", **variables))
        fields = asyncio.run(opened(stack.address, settings.opened))
        fields |= parked_memory(stack, redis, settings.parked)
    shown = {key: value for key, value in vars(settings).items() if key != "json"}
    print_result("sessions", shown, started, fields)


if __name__ == "__main__":
    main()
