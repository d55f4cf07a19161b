"""What long prompts cost other streams, and what a second turn costs with and without the prefix cache."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.load.stream_batches import Arm, StreamBatches
from benchmarks.shared.services import UpServices
from outrider.client import AsyncClient, Client

STREAMS = 8
ANSWER_TOKENS = 64
TURNS = 4


def long_prompt_figures(
    batches: StreamBatches, addresses: dict[str, str], length: int, repeats: int
) -> dict[str, Any]:
    """Longest gap of eight plain streams and ms to a long prompt's first token, by kind of prefill."""
    measured = {
        kind: [
            asyncio.run(_gap_and_first_token_ms(batches, address, _long_prompt(batches, n, length)))
            for n in range(repeats)
        ]
        for kind, address in addresses.items()
    }
    return {
        "longest_gap_ms": {kind: round(median(gap for gap, _ in got), 1) for kind, got in measured.items()},
        "first_token_ms": {
            kind: round(median(first for _, first in got), 1) for kind, got in measured.items()
        },
    }


async def _gap_and_first_token_ms(
    batches: StreamBatches, address: str, prompt: list[int]
) -> tuple[float, float]:
    async with AsyncClient(address) as client:
        arm = Arm(address, speculation=False)
        streams = [asyncio.create_task(batches.stream(client, arm, i)) for i in range(STREAMS)]
        await asyncio.sleep(0.3)
        started = time.perf_counter()
        await client.generate(ids=prompt, max_tokens=1, temperature=0.0, speculation=False)
        first_ms = (time.perf_counter() - started) * 1000
        return max(max(gaps) for _, gaps in await asyncio.gather(*streams)), first_ms


def _long_prompt(batches: StreamBatches, first: int, length: int) -> list[int]:
    """`length` tokens of held-out text, different for every `first`."""
    prompts = itertools.cycle([*batches.prompts[first:], *batches.prompts[:first]])
    return list(itertools.islice(itertools.chain.from_iterable(prompts), length))


def second_turn_figures(
    batches: StreamBatches, services: UpServices, length: int, repeats: int
) -> dict[str, Any]:
    """Ms to the first token of a second turn, its first turn cached and not, and the cache's hit rates."""
    cold, warm = [], []
    with Client(services.address) as client:
        for n in range(repeats):
            history = _long_prompt(batches, n, length)
            answer = client.generate(
                ids=history, max_tokens=ANSWER_TOKENS, temperature=0.0, tenant=f"warm-{n}"
            ).ids
            turn = [*history, *answer, *batches.prompts[-1][:16]]
            warm.append(_first_token_ms(client, turn, f"warm-{n}"))
            cold.append(_first_token_ms(client, turn, f"cold-{n}"))
        hits = {
            name: _hit_rate(client, services, batches, name, speculation)
            for name, speculation in (("speculation", True), ("plain", False))
        }
    turns = {"cold": round(median(cold), 1), "cached": round(median(warm), 1)}
    return {"second_turn_ms": turns, "hit_rate": hits}


def _first_token_ms(client: Client, ids: Sequence[int], tenant: str) -> float:
    started = time.perf_counter()
    client.generate(ids=list(ids), max_tokens=1, temperature=0.0, tenant=tenant)
    return (time.perf_counter() - started) * 1000


def _hit_rate(
    client: Client, services: UpServices, batches: StreamBatches, tenant: str, speculation: bool
) -> float:
    """Share of prompt tokens found in the prefix cache over greedy conversations of TURNS turns."""
    before = _looked_up_and_found(services)
    for prompt in batches.prompts[:4]:
        history = list(prompt)
        for _ in range(TURNS):
            done = client.generate(
                ids=history, max_tokens=ANSWER_TOKENS, temperature=0.0, tenant=tenant, speculation=speculation
            )
            history += [*done.ids, *batches.prompts[-1][:8]]
    asked, hit = (
        after - earlier for after, earlier in zip(_looked_up_and_found(services), before, strict=True)
    )
    return round(hit / asked, 4)


def _looked_up_and_found(services: UpServices) -> tuple[float, float]:
    """Tokens looked up in the prefix cache so far, and tokens found there."""
    return (
        services.metric("verifier", "outrider_prefix_cache_queries_total"),
        services.metric("verifier", "outrider_prefix_cache_hits_total"),
    )
