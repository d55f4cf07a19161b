"""Whatever a source does, the request goes on, its ids are the same, and what was dropped is counted."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_source import Draft, FakeSource, Oracle, View, running
from harness import Answer, Verifier, eventually, serving
from ngram_lm import NgramLM

PROMPT = (1, 2, 3)


async def expected_ids(verifier: Verifier, new: int) -> list[int]:
    verifier.target.step_s = 0.0
    ids = (await verifier.generate(PROMPT, new=new)).ids
    verifier.target.step_s = 0.003
    return ids


def dropped(verifier: Verifier, why: str, source: str = "drafter") -> float:
    return verifier.metric("source_drafts_dropped_total", source=source, why=why)


def lost(verifier: Verifier, why: str) -> float:
    return verifier.metric("source_sessions_lost_total", source="drafter", why=why)


MALFORMED: dict[str, Callable[[View], Draft]] = {
    "a cycle": lambda view: view.draft([1, 2], parents=[1, 0]),
    "a parent after its child": lambda view: view.draft([1, 2, 3], parents=[-1, 2, -1]),
    "a parent that is itself": lambda view: view.draft([1], parents=[0]),
    "300 nodes": lambda view: view.draft([1] * 300),
    "a million nodes": lambda view: view.draft([1] * 1_000_000, survival=b"1" * 1_000_000),
    "no node": lambda view: view.draft([]),
    "an id outside the vocabulary": lambda view: view.draft([24]),
    "too few parents": lambda view: view.draft([1, 2, 3], parents=[-1, 0]),
    "no survival": lambda view: view.draft([1, 2], survival=b""),
    "an epoch that does not exist yet": lambda view: view.draft([1], epoch=view.follow.epoch + 1),
}
STALE: dict[str, Callable[[View], Draft]] = {
    "a wrong hash": lambda view: view.draft([1, 2], prefix_hash=7),
    "an older epoch": lambda view: view.draft([1, 2], epoch=view.follow.epoch - 1),
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_is_dropped_and_mutes_the_source_for_the_session(kind: str) -> None:
    async with serving(NgramLM(24)) as verifier:
        ids = await expected_ids(verifier, 30)
        source = FakeSource(lambda view: [MALFORMED[kind](view), view.draft([1])])
        async with running(source) as server:
            answer = await verifier.generate(PROMPT, new=30, sources=[("drafter", server.address)])
            assert answer.ids == ids
            assert dropped(verifier, "malformed") >= 1
            assert lost(verifier, "muted") == 1
            await eventually(lambda: source.ended == 1)
        assert len(source.follows) == 1
        assert "drafter" not in answer.usage.accepted_by_source


@pytest.mark.parametrize("kind", STALE)
async def test_stale_is_dropped_and_counted_and_mutes_nobody(kind: str) -> None:
    async with serving(NgramLM(24)) as verifier:
        ids = await expected_ids(verifier, 20)
        async with running(FakeSource(lambda view: [STALE[kind](view)])) as server:
            answer = await verifier.generate(PROMPT, new=20, sources=[("drafter", server.address)])
        assert answer.ids == ids
        assert verifier.nodes("drafter", "stale") >= 2
        assert lost(verifier, "muted") == 0


async def test_an_alias_that_nobody_gave_is_counted_as_malformed() -> None:
    async with serving(NgramLM(24)) as verifier:
        ids = await expected_ids(verifier, 20)
        async with running(FakeSource(lambda view: [view.draft([1], alias=99)])) as server:
            answer = await verifier.generate(PROMPT, new=20, sources=[("drafter", server.address)])
        assert answer.ids == ids
        assert dropped(verifier, "malformed") > 0


async def test_a_source_that_is_malformed_across_sessions_is_left_alone_for_a_while() -> None:
    source = FakeSource(lambda view: [view.draft([24])])
    async with serving(NgramLM(24)) as verifier, running(source) as server:
        await expected_ids(verifier, 1)
        sources = [("drafter", server.address)]
        for _ in range(3):
            await verifier.generate(PROMPT, new=20, sources=sources)
        await eventually(lambda: verifier.metric("sources_attached") == 0)
        source.behave = lambda view: []
        request = verifier.request(PROMPT, new=200, sources=sources)
        await verifier.open(request)
        await eventually(lambda: source.streams == 2)
        await verifier.read(request)
        assert lost(verifier, "muted") == 3


async def test_a_source_that_stalls_holds_nobody_up() -> None:
    stall = asyncio.Event()

    class Stalled(FakeSource):
        async def Attach(self, request_iterator: Any, context: Any) -> Any:
            self.streams += 1
            await stall.wait()
            yield

    async with serving(NgramLM(24)) as verifier, running(Stalled()) as server:
        ids = await expected_ids(verifier, 30)
        answer = await verifier.generate(PROMPT, new=30, sources=[("drafter", server.address)])
        assert answer.ids == ids
        stall.set()


async def test_a_source_may_die_and_come_back_within_a_request() -> None:
    async with serving(NgramLM(24, max_length=512)) as verifier:
        ids = await expected_ids(verifier, 400)
        source = FakeSource(Oracle({PROMPT: ids}))
        async with running(source) as server:
            request = verifier.request(PROMPT, new=400, sources=[("drafter", server.address)])
            await verifier.open(request)
            reading = asyncio.create_task(verifier.read(request))
            await eventually(lambda: verifier.nodes("drafter", "accepted") > 5)
            await server.die()
            before = verifier.nodes("drafter", "accepted")
            await eventually(lambda: verifier.metric("sources_attached") == 0)
            await server.start()
            await eventually(lambda: verifier.nodes("drafter", "accepted") > before + 5)
            answer: Answer = await reading
        assert answer.ids == ids
        assert source.streams >= 2
        first, again = source.follows[0], source.follows[-1]
        assert list(first.ids) == list(PROMPT)
        assert list(again.ids) == [*PROMPT, *ids][: len(again.ids)]
        assert len(again.ids) > len(PROMPT)


async def test_a_source_that_is_not_there_yet_is_dialled_until_it_is() -> None:
    async with serving(NgramLM(24, max_length=512)) as verifier:
        ids = await expected_ids(verifier, 300)
        async with running(FakeSource(Oracle({PROMPT: ids}))) as server:
            await server.die()
            request = verifier.request(PROMPT, new=300, sources=[("drafter", server.address)])
            await verifier.open(request)
            reading = asyncio.create_task(verifier.read(request))
            await asyncio.sleep(0.1)
            await server.start()
            answer = await reading
        assert answer.ids == ids
        assert answer.usage.accepted_by_source["drafter"] > 0


async def test_a_source_that_floods_is_bounded() -> None:
    def flood(view: View) -> list[Draft]:
        return [view.draft([node % 24, 5, 6]) for node in range(5000)]

    async with serving(NgramLM(24)) as verifier:
        ids = await expected_ids(verifier, 30)
        async with running(FakeSource(flood)) as server:
            answer = await verifier.generate(PROMPT, new=30, sources=[("drafter", server.address)])
        assert answer.ids == ids
        assert dropped(verifier, "flooded") > 0


async def test_a_source_that_refuses_a_session_leaves_it_in_peace() -> None:
    source = FakeSource()
    source.refuse = "tokenizer aaaa is not bbbb"
    async with serving(NgramLM(24)) as verifier, running(source) as server:
        ids = await expected_ids(verifier, 20)
        answer = await verifier.generate(PROMPT, new=20, sources=[("drafter", server.address)])
        assert answer.ids == ids
        assert lost(verifier, "refused") == 1


async def test_one_message_goes_to_a_source_per_step() -> None:
    source = FakeSource()
    async with serving(NgramLM(24)) as verifier, running(source) as server:
        await expected_ids(verifier, 1)
        verifier.target.step_s = 0.01
        before = verifier.metric("steps_total")
        asked = {"new": 15, "sources": [("drafter", server.address)]}
        await asyncio.gather(*(verifier.generate((1, n), **asked) for n in range(4)))
        steps = verifier.metric("steps_total") - before
        await eventually(lambda: source.ended == 4)
    assert len(source.follows) == 4
    assert source.messages <= steps + len(source.follows)


async def test_a_source_is_told_what_it_needs_to_follow() -> None:
    source = FakeSource()
    target = NgramLM(24)
    target.step_s = 0.003
    async with serving(target) as verifier, running(source) as server:
        await verifier.generate(PROMPT, new=20, seed=99, node_limit=5, sources=[("drafter", server.address)])
    follow = source.follows[0]
    assert (follow.model, follow.vocabulary_size, follow.seed) == ("ngram", 24, 99)
    assert (follow.prompt_length, follow.limit) == (3, 23)
    assert follow.node_limit >= 5
    assert follow.sampling.temperature == 0.0
    assert follow.alias < 128
