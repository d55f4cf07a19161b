"""A source that brings nothing does not even hear of the sessions that begin while it rests."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from fake_source import Draft, FakeSource, View, running
from harness import QUICK, Verifier, eventually, hold_steps_for_drafts, hold_steps_until, serving
from ngram_lm import NgramLM

from outrider.wire.codec import SessionKey
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from tests.in_time import in_time
from verifier_service.engine.messages import Update
from verifier_service.engine.stats import CountsByName
from verifier_service.remote_sources.link import SourceLink
from verifier_service.remote_sources.source_rests import SourceActivity
from verifier_service.remote_sources.subscription import Subscription
from verifier_service.sessions.manager import SessionManager
from verifier_service.sessions.request import SessionRequest, SourceAddress
from verifier_service.sessions.table import SessionView
from verifier_service.sessions.watch import WatchReaders

WIDTH = 24
PROMPT = (1, 2, 3)
NEW = 60
LONG_REST = 20
"""Steps of a rest that are left to come, more than any of the short answers below take."""
NOTHING = 255
"""The least survival that asks a source to compute nothing."""


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


def subscription(handle: int) -> Subscription:
    key = SessionKey("", f"session {handle}")
    request = SessionRequest(key, 1, PROMPT, 3, 90, SamplingParams(), 7, (), None, 16, sources=())
    known = SessionView(handle, request, ("drafter",), {1: SourceAddress("drafter", "")}, None)
    return Subscription(known, (1,), ("drafter",), "m", "", WIDTH, SourceActivity())


async def answers_until_it_rests(verifier: Verifier, source: FakeSource, **named: Any) -> None:
    """Answers requests until the source rests for some while, also for sessions to come."""
    known = verifier.server._manager.reputations.of_address(["drafter"], SamplingParams(temperature=0))
    while not (known.activity.rest and known.activity.left > LONG_REST):
        await verifier.generate(PROMPT, **named)
    await eventually(lambda: source.ended == len(source.follows))


@pytest.mark.parametrize(
    ("learn", "learns"),
    [(False, None), (True, None), (True, True), (True, False)],
    ids=["may not be learnt from", "a source that says nothing", "learns", "learns nothing"],
)
async def test_sessions_that_begin_while_a_source_rests_are_kept_from_it(
    learn: bool, learns: bool | None
) -> None:
    told = learn and learns is not False
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=NEW)).ids
        source = FakeSource(Sure(plain))
        source.learns = learns
        async with running(source) as server:
            named = {"sources": [("drafter", server.address)], "learn": learn}
            hold_steps_for_drafts(verifier)
            await answers_until_it_rests(verifier, source, new=30, **named)
            assert verifier.metric("sources_resting", source="drafter", sampling="greedy") == 1
            verifier.target.before_forward = lambda: None
            assert (await verifier.generate(PROMPT, new=5, session="late", **named)).ids == plain[:5]
            short = [*PROMPT, *plain[:5]]
            await eventually(lambda: source.past.count(short) >= told)
    late = [follow for follow in source.follows if follow.key.session == "late"]
    assert [follow.node_limit > 0 for follow in late] == [False] * told
    assert source.past.count(short) == told


async def test_readers_hear_of_an_end_before_sources_are_sent_what_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def noted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def call(self: Any, *args: Any) -> Any:
            done.append(name)
            return method(self, *args)

        monkeypatch.setattr(kind, name, call)

    noted(SessionManager, "absorb")
    noted(WatchReaders, "announce")
    noted(SourceLink, "finish")
    async with serving(NgramLM(WIDTH)) as verifier, running(source := FakeSource()) as server:
        await verifier.generate(PROMPT, new=5, sources=[("drafter", server.address)], learn=True)
        await eventually(lambda: source.ended == 1)
    at = done.index("finish")
    assert done[at - 2 : at] == ["absorb", "announce"]


@pytest.mark.slow
async def test_a_source_that_rests_for_all_sessions_is_told_once_a_rest_to_compute_nothing() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=250)).ids
        source = FakeSource(Sure(plain))
        async with running(source) as server:
            hold_steps_for_drafts(verifier)
            named = {"new": 250, "sources": [("drafter", server.address)]}
            assert (await verifier.generate(PROMPT, **named)).ids == plain
    told = [number for number, least in enumerate(source.least) if least == NOTHING]
    assert len(told) > 1, "it was tried in between"
    assert all(after > before + 1 for before, after in pairwise(told))


async def test_a_source_that_rests_for_one_of_two_sessions_goes_on_computing() -> None:
    async with running(FakeSource()) as server:
        link = SourceLink(server.address, lambda command: None, CountsByName(), QUICK)
        try:
            for handle in (1, 2):
                link.subscribe(subscription(handle), resting=handle == 2)
            await eventually(lambda: len(server.source.follows) == 1)
            ids = PROMPT
            for rests, messages in ((False, 2), (True, 3), (True, 3), (False, 4)):
                ids += (5,)
                link.progress(Update(1, len(ids) - 1, ids[-1:], b"\0", prefix_hash(ids)), resting=rests)
                await eventually(lambda messages=messages: server.source.messages == messages)
        finally:
            await link.stream.close()
    assert server.source.least == [0, 0, NOTHING, 0]


async def test_it_is_followed_again_when_a_session_tries_it_and_goes_on_where_it_brings_something() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=NEW)).ids
        source = FakeSource(Sure(plain))
        async with running(source) as server:
            named = {"new": NEW, "sources": [("drafter", server.address)]}
            hold_steps_for_drafts(verifier)
            await answers_until_it_rests(verifier, source, **{**named, "new": 30})
            before = len(source.follows)
            source.behave = Sure(plain, right=True)
            accepted = 0
            while accepted < 20:
                answer = await verifier.generate(PROMPT, **named)
                assert answer.ids == plain
                accepted = answer.usage.accepted_by_source.get("drafter", 0)
            assert verifier.metric("sources_resting", source="drafter", sampling="greedy") == 0
    tried = source.follows[before]
    in_time(len(tried.ids) > len(PROMPT), "amid a session")


async def test_a_stream_that_is_dialled_anew_does_not_introduce_sessions_that_rest() -> None:
    async with running(FakeSource()) as server:
        link = SourceLink(server.address, lambda command: None, CountsByName(), QUICK)
        try:
            for handle in (1, 2):
                link.subscribe(subscription(handle), resting=True)
            await eventually(lambda: server.source.streams == 1)
            link.malformed()
            await eventually(lambda: server.source.streams == 2)
            link.progress(Update(2, 3, (5,), b"\0", prefix_hash((*PROMPT, 5))), resting=False)
            await eventually(lambda: len(server.source.follows) == 1)
        finally:
            await link.stream.close()
    assert server.source.follows[0].key.session == "session 2"


async def test_a_source_that_comes_back_amid_a_rest_is_tried_at_once() -> None:
    async with serving(NgramLM(WIDTH)) as verifier:
        plain = (await verifier.generate(PROMPT, new=NEW)).ids
        source = FakeSource(Sure(plain))
        async with running(source) as server:
            hold_steps_for_drafts(verifier)
            named = {"new": NEW, "sources": [("drafter", server.address)]}
            await answers_until_it_rests(verifier, source, **{**named, "new": 30})
            streams = source.streams
            verifier.target.before_forward = lambda: None
            verifier.target.step_s = 0.05
            hold_steps_until(verifier, lambda: source.streams > streams)
            source.behave = Sure(plain, right=True)
            request = verifier.request(PROMPT, session="amid", **{**named, "new": LONG_REST})
            await verifier.open(request)
            reading = asyncio.create_task(verifier.read(request))
            await server.die()
            await server.start()
            assert (await reading).ids == plain[:LONG_REST]
    tried = [follow for follow in source.follows if follow.key.session == "amid"]
    in_time(tried, "the session was over before it was followed")
    assert len(tried) == 1


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


async def test_sessions_of_all_kinds_hear_that_a_source_came_back() -> None:
    async with running(FakeSource()) as server:
        link = SourceLink(server.address, lambda command: None, CountsByName(), QUICK)
        try:
            first = subscription(1)
            link.subscribe(first, resting=True)
            await eventually(lambda: link.stream.attached)
            assert first.activity.comebacks == 0, "it was never away"
            link.malformed()
            link.unsubscribe(1)
            second = subscription(2)
            link.subscribe(second, resting=True)
            await eventually(lambda: second.activity.comebacks == 1)
            assert first.activity.comebacks == 1, "later sessions with those parameters ask here"
        finally:
            await link.stream.close()
