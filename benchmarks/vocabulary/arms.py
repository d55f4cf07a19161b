"""Timed batches of requests to one random model: through the services, and by transformers' `generate`."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.shared.figures import TimedRun
from benchmarks.shared.services import HfPeer, UpServices
from outrider.client import AsyncClient

TEMPERATURE, TOP_P = 0.8, 0.9
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.3}
ARMS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": TEMPERATURE},
    "top_p": {"temperature": TEMPERATURE, "top_p": TOP_P},
    "penalties": {"temperature": TEMPERATURE, **PENALTIES},
}
"""Sampling options by arm, as our clients name them."""
PROMPT_TOKENS = 8
GENERATE = "generate_"
"""Prefix of the arms that transformers decodes."""


CHOSEN = "outrider_verifier_tokens_chosen_total"
FALLBACKS = "outrider_verifier_choice_fallbacks_total"
DOWN = "outrider_verifier_bytes_down_total"


def prompt(stream: int, vocabulary: int) -> list[int]:
    """Token ids of a stream's prompt, which differs from every other prompt from the first id on."""
    return [
        1 + (stream * 31 + place * (stream % 97 + 3)) % (vocabulary - 1) for place in range(PROMPT_TOKENS)
    ]


class VocabularyArms:
    """Runs the arms of one model: our services decode some, transformers the others."""

    def __init__(self, services: UpServices, peer: HfPeer | None, vocabulary: int) -> None:
        self.services = services
        self._peer = peer
        self._vocabulary = vocabulary

    def names(self) -> list[str]:
        """All arms, those of transformers only where a peer runs."""
        return [*ARMS, *[GENERATE + arm for arm in ARMS if self._peer is not None]]

    def run(self, arm: str, streams: int, tokens: int, repeat: int) -> TimedRun:
        """Times one batch: all streams begin together, and the last token of the last one ends it."""
        if arm.startswith(GENERATE):
            return self._generate(arm, streams, tokens, repeat)
        return asyncio.run(self._serve(arm, streams, tokens, repeat))

    def chosen(self) -> tuple[float, ...]:
        """Tokens that the verifier has chosen so far, those from whole rows, and bytes from a device."""
        return tuple(self.services.metric_sum("verifier", name) for name in (CHOSEN, FALLBACKS, DOWN))

    async def _serve(self, arm: str, streams: int, tokens: int, repeat: int) -> TimedRun:
        options: dict[str, Any] = {
            **ARMS[arm],
            "max_tokens": tokens,
            "ignore_eos": True,
            "speculation": False,
        }
        prompts = [prompt(stream, self._vocabulary) for stream in range(streams)]
        async with AsyncClient(self.services.address) as client:
            await client.models()  # connects
            began = time.perf_counter()
            done = await asyncio.gather(
                *[client.generate(ids=ids, seed=1000 + at, **options) for at, ids in enumerate(prompts)]
            )
            seconds = time.perf_counter() - began
        ids = tuple(id_ for completion in done for id_ in completion.ids)
        if len(ids) != streams * tokens:
            raise SystemExit(f"{arm}: {len(ids)} tokens came in place of {streams * tokens}")
        return TimedRun(arm, streams, repeat, ids, seconds)

    def _generate(self, arm: str, streams: int, tokens: int, repeat: int) -> TimedRun:
        assert self._peer is not None
        options = ARMS[arm.removeprefix(GENERATE)]
        ids, seconds = self._peer.decode_batch(
            method="generate",
            batch=[prompt(stream, self._vocabulary) for stream in range(streams)],
            max_tokens=tokens,
            seed=1000,
            threads=1,
            # transformers has no presence and no frequency penalty.
            **{
                name: options[name]
                for name in ("temperature", "top_p", "repetition_penalty")
                if name in options
            },
        )
        return TimedRun(arm, streams, repeat, tuple(id_ for row in ids for id_ in row), seconds)
