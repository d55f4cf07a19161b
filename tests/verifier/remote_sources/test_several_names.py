"""A process of several names: counted by name, followed once, sent the end where it may learn from that."""

import asyncio
import random
from typing import Any

import pytest
from fake_source import Draft, FakeSource, Oracle, running
from harness import Verifier, eventually, hold_steps_for_drafts, hold_steps_until, serving
from ngram_lm import NgramLM

from tests.in_time import in_time
from verifier_service.engine.step_cost import StepCostModel

PROMPT = (1, 2, 3)
NEW = 60
NOTHING = 255
"""The least survival that asks a source to compute nothing while it rests."""


class Drawn:
    """Gives each draft to the first or the second name, drawn by lot.

    By turns, one name could get all drafts that come too late: where every other draft is accepted.
    """

    def __init__(self) -> None:
        self._lots = random.Random(0)

    def __call__(self, drafts: list[Draft]) -> bytes:
        return bytes(self._lots.randrange(2) for _ in drafts)


async def oracle(verifier: Verifier) -> Oracle:
    plain = await verifier.generate(PROMPT, new=NEW)
    return Oracle({PROMPT: plain.ids}, depth=1)


@pytest.fixture
def target() -> NgramLM:
    target = NgramLM(24)
    target.step_s = 0.015
    return target


async def test_each_draft_counts_for_the_name_that_sent_it(target: NgramLM) -> None:
    async with serving(target) as verifier:
        source = FakeSource(await oracle(verifier))
        source.names = Drawn()
        async with running(source) as server:
            names = [("corpus", server.address), ("past", server.address)]
            hold_steps_for_drafts(verifier)
            answer = await verifier.generate(PROMPT, new=NEW, sources=names)
    assert answer.ids == source.behave.answers[PROMPT]  # type: ignore[attr-defined]
    drafted, accepted = answer.usage.drafted_by_source, answer.usage.accepted_by_source
    in_time(set(drafted) == {"corpus", "past"}, drafted)
    in_time(accepted, "few drafts come in time, but not none")
    assert all(0 < count <= drafted[name] for name, count in accepted.items())
    assert (source.streams, [list(one.sources) for one in source.follows]) == (1, [["corpus", "past"]])


async def test_a_source_hears_which_survival_its_nodes_need(target: NgramLM) -> None:
    dear = StepCostModel({rows: 5.0 + 2.0 * rows for rows in (1, 8, 64, 256)})
    for costs, raised in ((dear, True), (StepCostModel({1: 5.0, 256: 5.0}), False)):
        async with serving(target, costs=costs) as verifier, running(FakeSource()) as server:
            hold_steps_until(verifier, lambda source=server.source: source.follows)
            await verifier.generate(PROMPT, new=NEW, sources=[("drafter", server.address)])
            asked = [least for least in server.source.least if least < NOTHING]
            assert any(asked) == raised
            assert max(server.source.least) <= NOTHING


async def test_a_name_that_is_left_out_later_is_listened_to_no_longer(target: NgramLM) -> None:
    async with serving(target) as verifier:
        source = FakeSource()
        async with running(source) as server:
            hold_steps_until(verifier, lambda: len(source.follows) == 2)
            asked: dict[str, Any] = {"new": NEW, "session": "one"}
            both = verifier.request(PROMPT, sources=[("a", server.address), ("b", server.address)], **asked)
            await verifier.open(both)
            reading = asyncio.create_task(verifier.read(both))
            await eventually(lambda: source.follows)
            await verifier.open(verifier.request(PROMPT, sources=[("b", server.address)], **asked))
            await eventually(lambda: len(source.follows) == 2)
            await verifier.cancel(both)
            await reading
    assert [list(one.sources) for one in source.follows] == [["a", "b"], ["b"]]


@pytest.mark.parametrize("sources", [b"\x00\x00\x00\x00", b"\x02"])
async def test_a_draft_of_no_name_is_malformed(target: NgramLM, sources: bytes) -> None:
    async with serving(target) as verifier:
        source = FakeSource(lambda view: [view.draft([1])])
        source.names = lambda drafts: sources
        counts = verifier.server._sources.counts
        async with running(source) as server:
            names = [("a", server.address), ("b", server.address)]
            hold_steps_until(verifier, lambda: counts["a"].malformed)
            answer = await verifier.generate(PROMPT, new=NEW, sources=names)
        assert answer.ids == (await verifier.generate(PROMPT, new=NEW)).ids
        assert verifier.metric("source_drafts_dropped_total", source="a", reason="malformed") == 1
        assert not answer.usage.accepted_by_source


@pytest.mark.parametrize("learn", [True, False])
async def test_a_source_hears_the_last_ids_where_it_may_learn_from_them(target: NgramLM, learn: bool) -> None:
    async with serving(target) as verifier:
        source = FakeSource()
        async with running(source) as server:
            names = [("past", server.address)]
            hold_steps_until(verifier, lambda: source.follows)
            answer = await verifier.generate(PROMPT, new=NEW, sources=names, learn=learn)
            await eventually(lambda: source.past)
    assert source.follows[0].learn == learn
    (known,) = source.past
    assert (known == [*PROMPT, *answer.ids]) == learn
    assert known == [*PROMPT, *answer.ids][: len(known)]


async def test_the_corpora_that_are_asked_for_are_passed_on(target: NgramLM) -> None:
    async with serving(target) as verifier:
        source = FakeSource()
        async with running(source) as server:
            names = [("corpus", server.address)]
            hold_steps_until(verifier, lambda: source.follows)
            await verifier.generate(PROMPT, new=NEW, sources=names, corpora=["code", "docs"])
    assert list(source.follows[0].corpora) == ["code", "docs"]
