"""The arms of the comparison: each decodes a batch of prompts at once and says how long that took."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.llama_server import LlamaServer
from benchmarks.shared.services import HfPeer
from outrider.client import AsyncClient

Prompts = Sequence[tuple[int, ...]]
HF_METHODS = {
    "hf_generate": "generate",
    "hf_assisted": "assisted",
    "hf_prompt_lookup": "prompt_lookup",
    "hf_early_exit": "early_exit",
}
"""How hf_peer.py decodes, by arm."""


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The ids of each prompt of a batch, and the seconds from the requests to the last token."""

    ids: tuple[tuple[int, ...], ...]
    seconds: float
    rounds: int = 0
    """Rounds of all requests; 0 where the arm does not count them."""


Decode = Callable[[Prompts, float, int], DecodedBatch]
"""Decodes prompts at a temperature, the first with this seed, the next with the next seed."""


def outrider_arm(address: str, speculation: bool, tokens: int) -> Decode:
    """An arm of the services behind the orchestrator at this address."""

    async def serve(prompts: Prompts, temperature: float, seed: int) -> DecodedBatch:
        async with AsyncClient(address) as client:
            await client.models()  # connects
            started = time.perf_counter()
            done = await asyncio.gather(
                *(
                    client.generate(
                        ids=list(prompt),
                        max_tokens=tokens,
                        temperature=temperature,
                        seed=seed + place,
                        ignore_eos=True,
                        speculation=speculation,
                    )
                    for place, prompt in enumerate(prompts)
                )
            )
            seconds = time.perf_counter() - started
        rounds = sum(completion.usage.rounds for completion in done)
        return DecodedBatch(tuple(tuple(completion.ids) for completion in done), seconds, rounds)

    return lambda prompts, temperature, seed: asyncio.run(serve(prompts, temperature, seed))


def hf_arm(peer: HfPeer, arm: str, threads: int, tokens: int) -> Decode:
    """An arm of transformers with this many torch threads; the prompts are one batch."""

    def run(prompts: Prompts, temperature: float, seed: int) -> DecodedBatch:
        made, seconds = peer.decode_batch(
            method=HF_METHODS[arm],
            batch=[list(prompt) for prompt in prompts],
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
            threads=threads,
        )
        return DecodedBatch(tuple(made), seconds)

    return run


def llama_arm(server: LlamaServer, tokens: int) -> Decode:
    """An arm of llama.cpp's server; sampled ids come from the whole distribution, as in the other arms."""

    def run(prompts: Prompts, temperature: float, seed: int) -> DecodedBatch:
        greedy, sampled = {"samplers": ["top_k"], "top_k": 1}, {"samplers": ["temperature"]}
        bodies = [
            {"prompt": list(prompt), "n_predict": tokens, "temperature": temperature, "seed": seed + place}
            | {"ignore_eos": True, "cache_prompt": False, "return_tokens": True}
            | (sampled if temperature > 0 else greedy)
            for place, prompt in enumerate(prompts)
        ]
        made, seconds = server.complete(bodies)
        return DecodedBatch(tuple(made), seconds)

    return run
