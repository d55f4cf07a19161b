"""A source that brings nothing does not even hear of the sessions that begin while it rests."""

import asyncio
from dataclasses import dataclass

import pytest
from fake_source import Draft, FakeSource, View, running
from harness import eventually, hold_steps_for_drafts, serving
from ngram_lm import NgramLM

WIDTH = 24
PROMPT = (1, 2, 3)
NEW = 60


@dataclass
class Sure:
    """Drafts some ids ahead: the right ones or others."""

    answer: list[int]
    right: bool = False

    def __call__(self, view: View) -> list[Draft]:
        ahead = self.answer[len(view.ids) - len(PROMPT) :][:8]
        return [view.draft([(token + (not self.right)) % WIDTH for token in ahead])] if ahead else []


@dataclass
class Behind:
    """Drafts for the session before, which has ended."""

    before: View | None = None
    last: View | None = None

    def __call__(self, view: View) -> list[Draft]:
        if view is not self.last:
            self.before, self.last = self.last, view
        return [] if self.before is None else [self.before.draft([1])]


@pytest.mark.parametrize("learn", [False, True])
async def test_sessions_that_begin_while_a_source_rests_are_kept_from_it(learn: bool) -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=NEW)).ids
        source = FakeSource(Sure(plain))
        async with running(source) as server:
            named = {"sources": [("drafter", server.address)], "learn": learn}
            hold_steps_for_drafts(verifier)
            assert (await verifier.generate(PROMPT, new=NEW, **named)).ids == plain
            assert verifier.metric("sources_resting", source="drafter", sampling="greedy") == 1
            assert verifier.metric("sources_resting", source="drafter", sampling="sampled") == 0
            verifier.target.before_forward = lambda: None
            assert (await verifier.generate(PROMPT, new=5, **named)).ids == plain[:5]
            await eventually(lambda: source.ended == 1 + learn)
    assert [follow.node_limit > 0 for follow in source.follows] == [True, *[False] * learn]
    assert source.past[1:] == [[*PROMPT, *plain[:5]]] * learn


async def test_it_is_followed_again_when_a_session_tries_it_and_goes_on_where_it_brings_something() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=NEW)).ids
        source = FakeSource(Sure(plain))
        async with running(source) as server:
            named = {"new": NEW, "sources": [("drafter", server.address)]}
            hold_steps_for_drafts(verifier)
            await verifier.generate(PROMPT, **named)
            source.behave = Sure(plain, right=True)
            accepted = 0
            while accepted < 20:
                answer = await verifier.generate(PROMPT, **named)
                assert answer.ids == plain
                accepted = answer.usage.accepted_by_source.get("drafter", 0)
            assert verifier.metric("sources_resting", source="drafter") == 0
    tried = next(follow for follow in source.follows[1:])
    assert len(tried.ids) > len(PROMPT), "amid a session"


async def test_a_stream_that_is_dialled_anew_does_not_introduce_sessions_that_rest() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=NEW)).ids
        source = FakeSource(Sure(plain))
        async with running(source) as server:
            hold_steps_for_drafts(verifier)
            named = {"new": NEW, "sources": [("drafter", server.address)]}
            await verifier.generate(PROMPT, **named)
            verifier.target.before_forward = lambda: None
            verifier.target.step_s = 0.05
            request = verifier.request(PROMPT, **{**named, "new": 10})
            await verifier.open(request)
            reading = asyncio.create_task(verifier.read(request))
            await server.die()
            await server.start()
            await eventually(lambda: source.streams == 2)
            assert (await reading).ids == plain[:10]
    assert len(source.follows) == 1


async def test_one_that_is_too_late_for_every_session_rests_too() -> None:
    target = NgramLM(WIDTH)
    target.step_s = 0.005
    async with serving(target) as verifier:
        plain = (await verifier.generate(PROMPT, new=20)).ids
        source = FakeSource(Behind())
        async with running(source) as server:
            for sessions in range(100):
                answer = await verifier.generate(PROMPT, new=20, sources=[("drafter", server.address)])
                assert answer.ids == plain
                await asyncio.sleep(0.05)
                if len(source.follows) <= sessions:
                    break
    assert len(source.follows) <= sessions
