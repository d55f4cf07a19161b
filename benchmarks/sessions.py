"""What a session costs: how many sessions open in a second, and the memory of one that waits for its client.

Run as `outrider bench sessions --json`. docs/figures/sessions.md says what each field means.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from typing import Any

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.figures import quantile
from benchmarks.shared.process_memory import resident_bytes
from benchmarks.shared.redis_process import RedisProcess
from benchmarks.shared.services import UpServices
from outrider.client import AsyncClient
from outrider.client.options import build_request
from outrider.runtime.children import reserved_address
from outrider.v1.generation_pb2_grpc import GenerationStub
from outrider.wire.channel import open_channel

PARKED = "outrider_verifier_sessions_parked"
COMMITTED = "outrider_verifier_committed_total"
PARK_TIMEOUT_S = 300.0
AT_ONCE = 32
UNCOUNTED = 4 * AT_ONCE
"""Sessions that warm the processes up before memory is measured."""
PROMPT_TOKENS = 32
"""Tokens of each prompt; no two prompts begin alike."""


def prompt(number: int) -> list[int]:
    """Token ids of a session's prompt, which differs from every other prompt from the first id on."""
    return [5 + (number * 31 + place * (number % 97 + 3)) % 4000 for place in range(PROMPT_TOKENS)]


async def open_rate(address: str, count: int) -> dict[str, Any]:
    """Opens `count` sessions of one token, AT_ONCE at a time: sessions per second, and milliseconds each."""
    waits: list[float] = []
    numbers = iter(range(count))

    async def ask(client: AsyncClient) -> None:
        for number in numbers:
            began = time.perf_counter()
            await client.generate(ids=prompt(number), max_tokens=1, speculation=False)
            waits.append((time.perf_counter() - began) * 1000)

    async with AsyncClient(address) as client:
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))  # warms the processes up
        waits.clear()
        numbers = iter(range(count, 2 * count))
        began = time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))
        seconds = time.perf_counter() - began
    return {
        "opened_per_second": round(count / seconds, 1),
        "open_ms": {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99)},
    }


async def abandon(address: str, numbers: range) -> None:
    """Opens a resumable session for each number, whose client disconnects after the first tokens."""
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


def parked_memory(services: UpServices, redis: RedisProcess, count: int) -> dict[str, Any]:
    """KiB by which each process grows per parked session, and how many tokens such a session has."""
    asyncio.run(abandon(services.address, range(100_000, 100_000 + UNCOUNTED)))
    _wait_parked(services, UNCOUNTED)
    pids = {process["role"]: process["pid"] for process in services.processes} | {"redis": redis.pid}
    before = {role: resident_bytes(pid) // 1024 for role, pid in pids.items()}
    committed = services.metric("verifier", COMMITTED)
    asyncio.run(abandon(services.address, range(200_000, 200_000 + count)))
    _wait_parked(services, UNCOUNTED + count)
    grown = {
        role: round((resident_bytes(pid) // 1024 - before[role]) / count, 1) for role, pid in pids.items()
    }
    ids = PROMPT_TOKENS + (services.metric("verifier", COMMITTED) - committed) / count
    return {"parked": count, "parked_kb": grown, "parked_ids": round(ids, 1)}


def _wait_parked(services: UpServices, count: int) -> None:
    ends = time.monotonic() + PARK_TIMEOUT_S
    while services.metric("verifier", PARKED) < count:
        if time.monotonic() > ends:
            raise SystemExit(f"only {services.metric('verifier', PARKED):g} of {count} sessions were parked")
        time.sleep(0.1)


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("sessions", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--opened", type=int, default=1000, help="sessions to open")
    parser.add_argument("--parked", type=int, default=500, help="sessions to park")
    return parser.parse_args()


def main() -> None:
    """Starts the services, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as held:
        redis = RedisProcess(held.enter_context(reserved_address()))
        held.callback(redis.stop, 5.0)
        redis.wait_ready()
        variables: dict[str, Any] = {
            "OUTRIDER_ORCHESTRATOR__STORE": "redis",
            "OUTRIDER_ORCHESTRATOR__REDIS_URL": f"redis://{redis.address}",
            "OUTRIDER_VERIFIER__MAX_SESSIONS": str(settings.parked + 2 * UNCOUNTED),
            "OUTRIDER_VERIFIER__ORPHAN_GRACE_S": "0.2",
        }
        services = held.enter_context(UpServices(settings.target, "none", **variables))
        fields = asyncio.run(open_rate(services.address, settings.opened))
        fields |= parked_memory(services, redis, settings.parked)
    print_result("sessions", settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
