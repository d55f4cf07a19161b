"""Two drafters on one session, one of which misbehaves: it wastes its own share alone, and is counted."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fake_source import Draft, FakeSource, Garbage, Oracle, View, running, silent
from harness import Verifier, eventually, serving
from ngram_lm import NgramLM

PROMPT = (1, 2, 3)
NEW = 220
FLOOD = 700
"""Drafts in one message: more than a verifier takes unread of one source."""


def greedy(target: NgramLM, count: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(np.argmax(target.logits(ids))))
    return ids[len(PROMPT) :]


@asynccontextmanager
async def worker() -> AsyncIterator[Verifier]:
    target = NgramLM(24)
    target.step_s = 0.002
    async with serving(target) as verifier:
        yield verifier


def replayed(view: View) -> list[Draft]:
    """The draft below the prompt, sent again and again."""
    return [view.draft([5, 6, 7], base=view.ids[: len(PROMPT)])]


def flooding(view: View) -> list[Draft]:
    return [view.draft([1])] * FLOOD


def of_another_session(view: View) -> list[Draft]:
    return [view.draft([1], alias=view.follow.alias + 1000)]


def of_an_epoch_to_come(view: View) -> list[Draft]:
    return [view.draft([1], epoch=view.follow.epoch + 1)]


def nodes(verifier: Verifier, outcome: str) -> float:
    return verifier.metric("source_nodes_total", source="second", outcome=outcome)


def dropped(verifier: Verifier, reason: str) -> float:
    return verifier.metric("source_drafts_dropped_total", source="second", reason=reason)


def resting(verifier: Verifier) -> float:
    """Whether sessions leave the source alone, as it gains too little."""
    return verifier.metric("sources_resting", source="second")


WAYS: dict[str, tuple[Callable[[View], list[Draft]], Callable[[Verifier], float]]] = {
    "lies": (Garbage(), lambda verifier: nodes(verifier, "offered") and resting(verifier)),
    "replays": (replayed, lambda verifier: nodes(verifier, "stale")),
    "floods": (flooding, lambda verifier: dropped(verifier, "flooded")),
    "sends another session's": (of_another_session, lambda verifier: dropped(verifier, "malformed")),
    "speaks of an epoch to come": (of_an_epoch_to_come, lambda verifier: dropped(verifier, "malformed")),
    "stalls": (silent, lambda verifier: not nodes(verifier, "offered") and resting(verifier)),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_other_drafter_goes_on_beside_one_that(way: str) -> None:
    behave, counted = WAYS[way]
    async with worker() as verifier:
        plain = greedy(verifier.target, NEW)
        good, bad = FakeSource(Oracle({PROMPT: plain})), FakeSource(behave)
        async with running(good) as first, running(bad) as second:
            both = [("drafter", first.address), ("second", second.address)]
            accepted = 0.0
            while not (accepted and counted(verifier)):
                answer = await verifier.generate(PROMPT, new=NEW, sources=both)
                assert answer.ids == plain
                accepted = verifier.metric("spec_decode_num_accepted_tokens_total", source="drafter")
            await eventually(lambda: verifier.metric("num_requests_running") == 0)
