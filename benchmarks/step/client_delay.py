"""What lies between a pass and the client's token: the time from the end of each pass to its tokens' arrival.

A verifier that notes its passes and an orchestrator run as processes; the streams are this process's. All
decode plainly.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.shared.envelope import module_command
from benchmarks.shared.services import HelperProcess, orchestrator
from benchmarks.step.timed_verifier import CommittedPass, read_passes
from benchmarks.vocabulary.arms import prompt
from outrider.client import AsyncClient

UNTIMED = 8
"""Tokens at the beginning of each stream that are not counted."""
VERIFIER = (
    "--threads",
    "1",
    "--no-prefix-cache",
    "--kv-mb",
    "256",
    "--log-level",
    "warning",
)

FINDING_TRIES = 200

Arrivals = list[list[float]]
"""When each token of each stream arrived, in seconds of time.perf_counter."""


def client_delay(
    target: str, folder: Path, counts: Sequence[int], tokens: int, repeats: int, passes: str
) -> dict[str, dict[str, float]]:
    """By number of streams, the repeat with the least median delay.

    Args:
        target: the model's folder.
        folder: for the verifier's notes.
        passes: how the target computes its passes, as `outrider serve verifier --passes` says.
    """
    found: dict[str, list[dict[str, float]]] = {str(count): [] for count in counts}
    notes = folder / "passes"
    notes.touch()
    with ExitStack() as held:
        command = module_command(
            "step.timed_verifier", str(notes), "--model", target, *VERIFIER, "--passes", passes
        )
        verifier = held.enter_context(HelperProcess(command))
        front = held.enter_context(orchestrator(verifier.address, "--log-level", "warning"))
        asyncio.run(_arrivals(front.address, 2, UNTIMED))
        for _ in range(repeats):
            for count in counts:
                before = notes.stat().st_size
                arrivals = asyncio.run(_arrivals(front.address, count, tokens + UNTIMED))
                found[str(count)].append(_delays(list(read_passes(notes, before)), arrivals))
    return {count: min(runs, key=lambda run: run["p50_ms"]) for count, runs in found.items()}


async def _arrivals(address: str, streams: int, tokens: int) -> Arrivals:
    """Stream k has k tokens more in its prompt than stream 0, by which its session is told apart."""
    async with AsyncClient(address) as client:
        vocabulary = await _vocabulary(client)
        return await asyncio.gather(
            *[_follow(client, _prompt(stream, vocabulary), tokens) for stream in range(streams)]
        )


async def _vocabulary(client: AsyncClient) -> int:
    """Width of the target's logits, once the orchestrator has found its verifier."""
    for _ in range(FINDING_TRIES):
        if models := await client.models():
            return models[0].vocabulary_size
        await asyncio.sleep(0.05)
    raise SystemExit("the orchestrator has not found its verifier")


def _prompt(stream: int, vocabulary: int) -> list[int]:
    ids = prompt(stream, vocabulary)
    return ids + ids[:stream]


async def _follow(client: AsyncClient, ids: list[int], tokens: int) -> list[float]:
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "speculation": False}
    found: list[float] = []
    async for chunk in client.stream(ids=ids, max_tokens=tokens, **options):
        found += [time.perf_counter()] * len(chunk.ids)
    return found


def _delays(passes: list[CommittedPass], arrivals: Arrivals) -> dict[str, float]:
    """Milliseconds from the end of a token's pass to its arrival, of a pass, and between two passes' ends."""
    ends: dict[int, dict[int, float]] = {}
    for done in passes:
        for place in range(done.tokens):
            ends.setdefault(done.handle, {})[done.position + place] = done.ended_s
    first = min(min(positions) for positions in ends.values())
    by_stream = {min(positions) - first: positions for positions in ends.values()}
    delays = [
        arrived - by_stream[stream][first + stream + place]
        for stream, times in enumerate(arrivals)
        for place, arrived in enumerate(times)
        if place >= UNTIMED
    ]
    alone = sorted({(done.ended_s, done.began_s) for done in passes})[UNTIMED:]
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(alone)]
    at_99 = quantiles(delays, n=100, method="inclusive")[98]
    pass_s = fmean(ended - began for ended, began in alone)
    spent = {"p50": median(delays), "p99": at_99, "pass": pass_s, "added": fmean(gaps) - pass_s}
    return {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in spent.items()}
