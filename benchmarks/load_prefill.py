"""What long prompts cost others, what a second turn costs, and what of it is found cached."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from stack import Stack
from streams import Arm, Load

from outrider.client import AsyncClient, Client

STREAMS = 8
ANSWER = 64
TURNS = 4


def long_prompt_figures(load: Load, addresses: dict[str, str], length: int, repeats: int) -> dict[str, Any]:
    """Eight plain streams' longest gap, and the long prompt's first token, by how the prompt is computed."""
    measured = {
        kind: [asyncio.run(_beside(load, address, _long(load, n, length))) for n in range(repeats)]
        for kind, address in addresses.items()
    }
    return {
        "longest_gap_ms": {kind: round(median(gap for gap, _ in got), 1) for kind, got in measured.items()},
        "first_token_ms": {
            kind: round(median(first for _, first in got), 1) for kind, got in measured.items()
        },
    }


async def _beside(load: Load, address: str, prompt: list[int]) -> tuple[float, float]:
    async with AsyncClient(address) as client:
        arm = Arm(address, speculation=False)
        streams = [asyncio.create_task(load.stream(client, arm, i)) for i in range(STREAMS)]
        await asyncio.sleep(0.3)
        started = time.perf_counter()
        await client.generate(ids=prompt, max_tokens=1, temperature=0.0, speculation=False)
        first_ms = (time.perf_counter() - started) * 1000
        return max(max(gaps) for _, gaps in await asyncio.gather(*streams)), first_ms


def _long(load: Load, first: int, length: int) -> list[int]:
    """Held-out text of so many ids, another for every `first`."""
    prompts = itertools.cycle([*load.prompts[first:], *load.prompts[:first]])
    return list(itertools.islice(itertools.chain.from_iterable(prompts), length))


def second_turn_figures(load: Load, stack: Stack, length: int, repeats: int) -> dict[str, Any]:
    """Ms to the first token of a conversation's second turn, its first turn cached and not; and the hits."""
    cold, warm = [], []
    with Client(stack.address) as client:
        for n in range(repeats):
            history = _long(load, n, length)
            answer = client.generate(ids=history, max_tokens=ANSWER, temperature=0.0, tenant=f"warm-{n}").ids
            turn = [*history, *answer, *load.prompts[-1][:16]]
            warm.append(_first_token_ms(client, turn, f"warm-{n}"))
            cold.append(_first_token_ms(client, turn, f"cold-{n}"))
        hits = {
            name: _hit_rate(client, stack, load, name, speculation)
            for name, speculation in (("speculation", True), ("plain", False))
        }
    turns = {"cold": round(median(cold), 1), "cached": round(median(warm), 1)}
    return {"second_turn_ms": turns, "hit_rate": hits}


def _first_token_ms(client: Client, ids: Sequence[int], tenant: str) -> float:
    started = time.perf_counter()
    client.generate(ids=list(ids), max_tokens=1, temperature=0.0, tenant=tenant)
    return (time.perf_counter() - started) * 1000


def _hit_rate(client: Client, stack: Stack, load: Load, tenant: str, speculation: bool) -> float:
    """Share of all prompt ids found cached in conversations of some turns, greedy."""
    before = _cached(stack)
    for prompt in load.prompts[:4]:
        history = list(prompt)
        for _ in range(TURNS):
            done = client.generate(
                ids=history, max_tokens=ANSWER, temperature=0.0, tenant=tenant, speculation=speculation
            )
            history += [*done.ids, *load.prompts[-1][:8]]
    asked, hit = (after - earlier for after, earlier in zip(_cached(stack), before, strict=True))
    return round(hit / asked, 4)


def _cached(stack: Stack) -> tuple[float, float]:
    """Ids looked up among the cached prefixes so far, and ids found."""
    return (
        stack.metric("verifier", "outrider_prefix_cache_queries_total"),
        stack.metric("verifier", "outrider_prefix_cache_hits_total"),
    )
