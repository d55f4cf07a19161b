"""Whatever a source does, the request goes on, its ids are the same, and what was dropped is counted.

Requests here are endless: each goes on until what the test waits for has come to be, and is then cancelled.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_source import Behaviour, Draft, FakeSource, Running, View, running, silent
from harness import Verifier, eventually, hold_steps_for_drafts, serving
from ngram_lm import NgramLM

from outrider.wire.origin import bound_fields
from tests.in_time import in_time
from verifier_service.remote_sources.stream import AttachStream, LinkLimits

PROMPT = (1, 2, 3)
ENDLESS = 4000


def greedy(target: NgramLM, count: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(np.argmax(target.logits(ids))))
    return ids[len(PROMPT) :]


@asynccontextmanager
async def worker() -> AsyncIterator[Verifier]:
    target = NgramLM(24, max_length=2 * ENDLESS)
    target.step_s = 0.003
    async with serving(target) as verifier:
        yield verifier


async def decode(
    verifier: Verifier, server: Running, until: Callable[[], object], meanwhile: Awaitable[None] | None = None
) -> None:
    """Decodes with this source until something is so; the ids are those without it."""
    request = verifier.request(PROMPT, new=ENDLESS, sources=[("drafter", server.address)])
    await verifier.open(request)
    reading = asyncio.create_task(verifier.read(request))
    if meanwhile is not None:
        await meanwhile
    await eventually(until)
    progressed = verifier.metric("committed_total")
    await eventually(lambda: verifier.metric("committed_total") > progressed + 3)
    await verifier.cancel(request)
    answer = await reading
    assert answer.ids == greedy(verifier.target, len(answer.ids))


def dropped(verifier: Verifier, why: str) -> float:
    return verifier.metric("source_drafts_dropped_total", source="drafter", reason=why)


def lost(verifier: Verifier, why: str) -> float:
    return verifier.metric("source_sessions_lost_total", source="drafter", reason=why)


def more_are_lost(verifier: Verifier, why: str, before: float) -> bool:
    return lost(verifier, why) > before


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
    source = FakeSource(lambda view: [MALFORMED[kind](view), view.draft([1])])
    async with worker() as verifier, running(source) as server:
        await decode(verifier, server, lambda: source.ended)
        assert dropped(verifier, "malformed") >= 1
        assert lost(verifier, "muted") == 1
        assert (len(source.follows), source.ended) == (1, 1)


@pytest.mark.parametrize("kind", STALE)
async def test_stale_is_dropped_and_counted_and_mutes_nobody(kind: str) -> None:
    async with worker() as verifier, running(FakeSource(lambda view: [STALE[kind](view)])) as server:
        await decode(verifier, server, lambda: verifier.nodes("drafter", "stale") > 4)
        assert dropped(verifier, "malformed") == lost(verifier, "muted") == 0


async def test_an_alias_that_nobody_gave_is_counted_as_malformed() -> None:
    source = FakeSource(lambda view: [view.draft([1], alias=99)])
    async with worker() as verifier, running(source) as server:
        await decode(verifier, server, lambda: dropped(verifier, "malformed") > 2)


async def test_a_source_that_is_malformed_across_sessions_is_left_alone_for_a_while() -> None:
    source = FakeSource(lambda view: [view.draft([24])])
    async with worker() as verifier, running(source) as server:
        for _ in range(3):
            muted = lost(verifier, "muted")
            await decode(verifier, server, partial(more_are_lost, verifier, "muted", muted))
        await eventually(lambda: verifier.metric("sources_attached") == 0)
        source.behave = silent
        await decode(verifier, server, lambda: source.streams == 2 and source.views)


async def test_a_source_that_stalls_holds_nobody_up() -> None:
    stall = asyncio.Event()

    class Stalled(FakeSource):
        async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            self.streams += 1
            await stall.wait()
            yield

    source = Stalled()
    async with worker() as verifier, running(source) as server:
        await decode(verifier, server, lambda: source.streams)
        stall.set()


def one_ahead(target: NgramLM) -> Behaviour:
    """Drafts the token that comes next, and one that does not."""

    def behave(view: View) -> list[Draft]:
        token = int(np.argmax(target.logits(view.ids)))
        after = int(np.argmax(target.logits([*view.ids, token])))
        return [view.draft([(token + 1) % 24, token, after], parents=[-1, -1, 1])]

    return behave


async def test_a_source_may_die_and_come_back_within_a_request() -> None:
    async with worker() as verifier:
        source = FakeSource(one_ahead(verifier.target))
        async with running(source) as server:

            async def die_and_come_back() -> None:
                await eventually(lambda: verifier.nodes("drafter", "accepted") > 3)
                await server.die()
                await eventually(lambda: verifier.metric("sources_attached") == 0)
                await server.start()

            await decode(
                verifier,
                server,
                lambda: source.streams > 1 and verifier.nodes("drafter", "accepted") > 30,
                die_and_come_back(),
            )
        first, again = source.follows[0], source.follows[-1]
        assert list(again.ids[3:]) == greedy(verifier.target, len(again.ids) - 3)
        assert len(again.ids) > len(first.ids)


async def test_a_source_that_is_not_there_yet_is_dialled_until_it_is() -> None:
    async with worker() as verifier, running(FakeSource(one_ahead(verifier.target))) as server:
        await server.die()

        async def come() -> None:
            await asyncio.sleep(0.1)
            await server.start()

        await decode(verifier, server, lambda: verifier.nodes("drafter", "accepted") > 3, come())


@pytest.mark.slow
async def test_a_source_that_floods_is_bounded() -> None:
    def flood(view: View) -> list[Draft]:
        return [view.draft([node % 24, 5, 6]) for node in range(1500)]

    async with worker() as verifier, running(FakeSource(flood)) as server:
        hold_steps_for_drafts(verifier)  # or the source rests before its first message has come
        await decode(verifier, server, lambda: dropped(verifier, "flooded") > 900)


async def test_a_source_that_refuses_a_session_leaves_it_in_peace() -> None:
    source = FakeSource()
    source.refuse = "tokenizer aaaa is not bbbb"
    async with worker() as verifier, running(source) as server:
        await decode(verifier, server, lambda: lost(verifier, "refused") == 1)


async def test_one_message_goes_to_a_source_per_step() -> None:
    source = FakeSource()
    async with worker() as verifier, running(source) as server:
        verifier.target.step_s = 0.01
        asked: dict[str, Any] = {"new": 15, "sources": [("drafter", server.address)]}
        await asyncio.gather(*(verifier.generate((1, n), **asked) for n in range(4)))
        steps = verifier.metric("steps_total")
    assert source.messages <= steps + len(source.follows)


async def test_a_follow_carries_all_that_a_source_needs() -> None:
    source = FakeSource()
    async with worker() as verifier, running(source) as server:
        sources = [("drafter", server.address)]
        request = verifier.request(PROMPT, new=ENDLESS, seed=99, node_limit=5, sources=sources)
        await verifier.open(request)
        await eventually(lambda: source.follows)
        await verifier.cancel(request)
        await eventually(lambda: source.ended == 1)
    follow = source.follows[0]
    assert (follow.model, follow.vocabulary_size, follow.seed) == ("ngram", 24, 99)
    assert (follow.prompt_length, follow.limit) == (3, 3 + ENDLESS)
    assert follow.node_limit >= 5
    assert follow.sampling.temperature == 0.0
    assert follow.alias < 128


async def test_a_source_that_takes_no_messages_is_dropped_and_dialled_again() -> None:
    class Deaf(FakeSource):
        async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            self.streams += 1
            await asyncio.sleep(60)
            yield

    source, target = Deaf(), NgramLM(1 << 17, max_length=8192)
    target.step_s = 0.02
    async with serving(target) as verifier, running(source, window=65_536) as server:
        sources = [("drafter", server.address)]
        requests = [
            verifier.request([n] * 8000, new=150, sources=sources) for n in range(1 << 16, (1 << 16) + 8)
        ]
        for request in requests:
            await verifier.open(request)
        await eventually(lambda: source.streams > 1)
        for request in requests:
            await verifier.cancel(request)


class EndedCall:
    """A call that has ended, whose reader has not noticed the end yet."""

    async def write(self, message: Any) -> None:
        raise asyncio.InvalidStateError("RPC already finished")

    async def details(self) -> str:
        return "Socket closed"

    async def __aiter__(self) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield

    def cancel(self) -> None:
        pass


class ClosedCall(EndedCall):
    """A call whose stream the source ends in good order."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in ():
            yield


class CancelledCall(EndedCall):
    """A call that is cancelled under its reader, as by a write that took too long."""

    async def write(self, message: Any) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise asyncio.CancelledError
        yield


async def test_a_stream_whose_call_is_cancelled_is_dialled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dialled: list[None] = []

    def call(*_: Any) -> CancelledCall:
        dialled.append(None)
        return CancelledCall()

    monkeypatch.setattr(AttachStream, "_call", call)
    async with worker() as verifier, running(FakeSource()) as server:
        await decode(verifier, server, lambda: len(dialled) > 1)
    assert "source lost: its call was cancelled" in caplog.text


async def test_a_source_that_ends_its_stream_in_good_order_is_no_reason_for_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AttachStream, "_call", lambda *_: ClosedCall())
    caplog.set_level(logging.INFO)
    said = "source lost: the source closed the stream"
    async with worker() as verifier, running(FakeSource()) as server:
        await decode(verifier, server, lambda: said in caplog.text)
    assert {record.levelname for record in caplog.records if record.getMessage() == said} == {"INFO"}


async def test_a_write_to_a_stream_that_has_just_ended_is_a_lost_source_and_no_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AttachStream, "_call", lambda *_: EndedCall())
    async with worker() as verifier, running(FakeSource()) as server:
        await decode(verifier, server, lambda: "source lost: Socket closed" in caplog.text)
    assert "Traceback" not in caplog.text


async def test_what_becomes_of_a_source_is_not_logged_under_the_request_that_came_first() -> None:
    logged: list[tuple[str, dict[str, str]]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append((record.getMessage(), dict(bound_fields())))

    logger, handler = logging.getLogger("verifier_service"), Noting()
    logger.addHandler(handler)
    try:
        async with worker() as verifier, running(FakeSource()) as server:
            await decode(verifier, server, lambda: server.source.streams > 0)
            await server.die()
            await eventually(lambda: any(said.startswith("source lost") for said, _ in logged))
    finally:
        logger.removeHandler(handler)
    assert all(fields == {} for said, fields in logged if said.startswith("source lost"))


async def test_what_a_source_says_is_logged_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    source.refuse = "no" * 100_000
    async with worker() as verifier, running(source) as server:
        await decode(verifier, server, lambda: lost(verifier, "refused") == 1)
    (said,) = (record.message for record in caplog.records if "does not follow" in record.message)
    assert said.endswith("... (200000 characters)")
    assert len(said) < 600


class Taciturn:
    """A stream's user that says nothing and hears nothing."""

    def stream_opened(self) -> None: ...

    def described(self, description: Any) -> None: ...

    def stream_closed(self) -> None: ...

    def malformed(self) -> None: ...

    def next_request(self) -> None: ...

    async def receive(self, response: Any) -> None: ...


async def test_a_source_that_is_muted_again_while_it_is_muted_is_left_alone_until_both_are_over() -> None:
    async with running(FakeSource()) as server:
        limits = LinkLimits(redial_first_s=0.001, redial_most_s=0.001)
        stream = AttachStream(server.address, Taciturn(), limits)
        stream.want()
        try:
            await eventually(lambda: server.source.streams == 1)
            stream.mute(1.0)
            await eventually(lambda: not stream.attached)
            await asyncio.sleep(0.1)  # until the stream waits for the end of the first time
            in_time(server.source.streams == 1, "the first time was over before the second began")
            began = time.monotonic()
            stream.mute(1.5)
            await eventually(lambda: server.source.streams == 2)
            assert time.monotonic() - began >= 1.5
        finally:
            await stream.close()


async def test_a_caller_that_is_cancelled_while_a_stream_closes_stays_cancelled() -> None:
    user: Any = None  # nothing asks it while the stream is not wanted
    stream = AttachStream("127.0.0.1:9", user, LinkLimits())
    await asyncio.sleep(0)
    closing = asyncio.create_task(stream.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait((closing,))
    assert closing.cancelled()
