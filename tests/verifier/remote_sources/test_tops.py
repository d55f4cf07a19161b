"""A source that asks is told what the target said; one that does not ask is told nothing of it."""

from typing import Any

import numpy as np
import pytest
from fake_source import Draft, FakeSource, Oracle, View, running
from harness import GREEDY, Verifier, hold_steps_for_drafts, hold_steps_until, serving
from ngram_lm import NgramLM

from outrider.wire.observed import observed_from_wire
from speculative.hashing import extend, prefix_hash
from speculative.params import SamplingParams
from tests.in_time import in_time

PROMPT = (1, 2, 3)
SAMPLED = SamplingParams(temperature=0.8)
NEW = 30


def wrong(view: View) -> list[Draft]:
    """Two siblings, at most one of them right."""
    return [view.draft([4, 5], [-1, -1])]


def likeliest(target: NgramLM, ids: list[int], count: int) -> tuple[int, ...]:
    return tuple(np.argsort(-target.logits(ids), kind="stable")[:count].tolist())


async def generated(verifier: Verifier, source: FakeSource, **asked: Any) -> list[int]:
    hold_steps_for_drafts(verifier)
    async with running(source) as server:
        answer = await verifier.generate(PROMPT, new=NEW, sources=[("drafter", server.address)], **asked)
    return answer.ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tops", [1, 5, 32])
async def test_a_source_that_asks_hears_what_was_likely_at_every_row(
    params: SamplingParams, tops: int
) -> None:
    target = NgramLM(24)
    count = min(tops, 24)
    async with serving(target, budget="fixed") as verifier:
        plain = await verifier.generate(PROMPT, new=NEW, params=params)
        source = FakeSource(Oracle({PROMPT: plain.ids}, depth=2, siblings=2))
        source.tops = tops
        assert await generated(verifier, source, params=params) == plain.ids
    ids = [*PROMPT, *plain.ids]
    known = {prefix_hash(ids[:length]): ids[:length] for length in range(len(PROMPT), len(ids))}
    heard = [progress for progress in source.progress if progress.tops]
    in_time(len(heard) > 4, heard)
    off_path = 0
    for progress in heard:
        said = observed_from_wire(progress.tops, progress.off_path, count)
        end = progress.position + len(progress.ids)
        for place, top in zip(range(end - len(said.tops), end), said.tops, strict=True):
            assert top.ids == likeliest(target, ids[:place], count)
            assert sorted(top.logprobs, reverse=True) == list(top.logprobs)
        for row in said.off_path:
            off_path += 1
            before = next(ids for hash_, ids in known.items() if extend(hash_, row.last) == row.prefix_hash)
            assert row.top_ids == likeliest(target, [*before, row.last], count)
            assert params is SAMPLED or row.token == row.top_ids[0]
    in_time(off_path > 4, off_path)


async def test_a_source_that_does_not_ask_is_told_nothing_of_it() -> None:
    source = FakeSource(wrong)
    async with serving(NgramLM(24)) as verifier:
        await generated(verifier, source)
    assert source.progress
    assert not any(progress.tops or progress.off_path for progress in source.progress)


async def test_two_sources_of_a_session_each_hear_as_much_as_they_asked_for() -> None:
    few, many = FakeSource(wrong), FakeSource()
    few.tops, many.tops = 2, 7
    async with serving(NgramLM(24)) as verifier, running(few) as one, running(many) as other:
        links = verifier.server._sources._links
        hold_steps_for_drafts(verifier)
        hold_steps_until(verifier, lambda: [link._tops for link in links.copy().values()] == [2, 7])
        sources = [("drafter", one.address), ("corpus", other.address)]
        await verifier.generate(PROMPT, new=NEW, sources=sources)
    for source in (few, many):
        for progress in source.progress:
            observed_from_wire(progress.tops, progress.off_path, source.tops)
        assert any(progress.tops for progress in source.progress)


async def test_a_source_that_cannot_describe_itself_drafts_all_the_same() -> None:
    class Silent(FakeSource):
        async def Describe(self, request: Any, context: Any) -> Any:
            raise RuntimeError("not today")

    source = Silent(wrong)
    async with serving(NgramLM(24)) as verifier:
        plain = await verifier.generate(PROMPT, new=NEW)
        assert await generated(verifier, source) == plain.ids
        in_time(verifier.nodes("drafter", "kept") > 0)
