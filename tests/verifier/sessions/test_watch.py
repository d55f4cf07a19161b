"""Readers have cursors and no queues: each gets what lies between its position and the committed length."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from harness import Verifier, eventually, serving
from ngram_lm import NgramLM

from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import SessionKey, key_to_wire
from speculative.errors import InvalidRequest
from tests.in_time import in_time
from tests.verifier.sessions.test_session_table import FINISH, added, update
from verifier_service.engine.messages import Finish
from verifier_service.server import _BEAT_S
from verifier_service.sessions.table import SessionTable
from verifier_service.sessions.watch import LONG_US, MOST_QUIET_S, QUIET_S, WATCH_SHARE, WatchReaders

ERROR = common_pb2.FINISH_REASON_ERROR


def cursor(request: Any, position: int, alias: int = 1, epoch: int | None = None) -> verifier_pb2.Cursor:
    chosen = request.epoch if epoch is None else epoch
    return verifier_pb2.Cursor(alias=alias, key=request.key, epoch=chosen, position=position)


def unknown(alias: int) -> verifier_pb2.Cursor:
    """A cursor of a session that nobody opened."""
    return verifier_pb2.Cursor(alias=alias, key=key_to_wire(SessionKey("tenant", "nobody")), epoch=1)


async def read_to_the_end(call: Any) -> None:
    async for _ in call:
        pass


async def first_word(verifier: Verifier, *cursors: verifier_pb2.Cursor) -> list[verifier_pb2.Committed]:
    """The first message that is more than a beat."""
    call = verifier.stub.Watch()
    await call.write(verifier_pb2.WatchRequest(add=cursors))
    async with asyncio.timeout(60):
        async for response in call:
            if response.committed:
                call.cancel()
                return list(response.committed)
    raise AssertionError("the stream ended")


async def test_an_unknown_session_is_said_to_be_unknown() -> None:
    async with serving(NgramLM()) as verifier:
        (said,) = await first_word(verifier, cursor(verifier.request([1]), 1))
        assert (said.alias, said.finished, said.code) == (1, ERROR, 5)
        nameless = verifier_pb2.Cursor(alias=2)
        (said,) = await first_word(verifier, nameless)
        assert (said.alias, said.code) == (2, 5)


async def test_another_epoch_gets_a_code_of_its_own() -> None:
    async with serving(NgramLM()) as verifier:
        request = verifier.request([1, 2], epoch=10)
        await verifier.open(request)
        (older,) = await first_word(verifier, cursor(request, 2, epoch=9))
        (newer,) = await first_word(verifier, cursor(request, 2, epoch=11))
    assert (older.code, newer.code) == (10, 5)


async def test_a_finished_session_can_be_read_again_from_any_position() -> None:
    async with serving(NgramLM()) as verifier:
        request = verifier.request([1, 2, 3], new=10)
        await verifier.open(request)
        whole = await verifier.read(request)
        assert (await verifier.read(request)).ids == whole.ids
        assert (await verifier.read(request, position=7)).ids == whole.ids[4:]
        assert (await verifier.read(request, position=1)).ids == [2, 3, *whole.ids]
        end = await verifier.read(request, position=13)
        assert (end.ids, end.finished) == ([], whole.finished)
        assert end.usage == whole.usage


async def test_a_finished_session_is_forgotten_after_a_while_but_its_epoch_is_not() -> None:
    async with serving(NgramLM(), lease_s=0.1) as verifier:
        request = verifier.request([1, 2, 3], new=4, epoch=50)
        await verifier.open(request)
        await verifier.read(request)
        await eventually(lambda: verifier.server._table.find(SessionKey("", request.key.session)) is None)
        (said,) = await first_word(verifier, cursor(request, 3))
        assert said.code == 5
        request.epoch = 49
        with pytest.raises(grpc.aio.AioRpcError, match="older"):
            await verifier.open(request)


async def test_several_readers_each_get_everything_once() -> None:
    target = NgramLM()
    target.step_s = 0.001
    async with serving(target) as verifier:
        request = verifier.request([1, 2, 3], new=100)
        await verifier.open(request)
        answers = await asyncio.gather(*(verifier.read(request) for _ in range(3)))
    assert answers[0].ids == answers[1].ids == answers[2].ids
    assert len(answers[0].ids) == 100


async def test_one_stream_reads_many_sessions_and_drops_some() -> None:
    target = NgramLM(max_length=4096)
    target.step_s = 0.001
    async with serving(target) as verifier:
        requests = [verifier.request([1, 2, n], new=60) for n in range(4)]
        endless = verifier.request([1, 2], new=4000)
        for request in (*requests, endless):
            await verifier.open(request)
        call = verifier.stub.Watch()
        cursors = [cursor(request, 3, alias=n) for n, request in enumerate(requests)]
        await call.write(verifier_pb2.WatchRequest(add=[*cursors, cursor(endless, 2, alias=9)]))
        got: dict[int, list[int]] = {n: [] for n in (0, 1, 2, 3, 9)}
        finished: set[int] = set()
        dropped_at = None
        async with asyncio.timeout(60):
            async for response in call:
                for committed in response.committed:
                    got[committed.alias].extend(committed.ids)
                    finished |= {committed.alias} if committed.finished else set()
                if dropped_at is None and len(got[9]) > 5:
                    await call.write(verifier_pb2.WatchRequest(drop=[9]))
                    dropped_at = len(got[9])
                if len(finished) == 4:
                    break
        assert [len(got[n]) for n in range(4)] == [60] * 4
        call.cancel()
        assert await verifier.cancel(endless)


async def beats_until(call: Any, ended: Callable[[list[verifier_pb2.Beat]], bool]) -> list[verifier_pb2.Beat]:
    """The beats that a stream brings, up to the first that ends the wait."""
    beats: list[verifier_pb2.Beat] = []
    async with asyncio.timeout(60):
        async for response in call:
            beats.append(response.beat)
            if ended(beats):
                return beats
    raise AssertionError("the stream ended")


def the_last_step_is_over(beats: list[verifier_pb2.Beat]) -> bool:
    return beats[-1].step == 20 and not beats[-1].expected_us


async def test_beats_come_while_idle() -> None:
    async with serving(NgramLM()) as verifier:
        beats = await beats_until(verifier.stub.Watch(), lambda beats: len(beats) == 4)
    assert {beat.step for beat in beats} == {0}
    assert {beat.expected_us for beat in beats} == {0}


async def test_a_reader_with_a_session_gets_a_beat_with_the_tokens_of_every_step() -> None:
    target = NgramLM()
    target.step_s = 0.01
    async with serving(target) as verifier:
        await verifier.generate([1, 2], new=10)
        request = verifier.request([1, 2], new=10)
        await verifier.open(request)
        call = verifier.stub.Watch()
        await call.write(verifier_pb2.WatchRequest(add=[cursor(request, 2)]))
        beats = await beats_until(call, the_last_step_is_over)
    assert [beat.step for beat in beats] == sorted(beat.step for beat in beats)
    in_time({13, 15, 17, 19} <= {beat.step for beat in beats}, "two steps were over before a message left")
    in_time(any(5_000 < beat.expected_us < 100_000 for beat in beats), beats)


async def test_a_reader_without_news_gets_few_of_the_beats_and_tells_that_the_verifier_lives() -> None:
    target = NgramLM()
    target.step_s = 0.005
    async with serving(target) as verifier:
        call = verifier.stub.Watch()
        request = verifier.request([1, 2], new=100)
        await verifier.open(request)
        began = time.monotonic()
        beats = await beats_until(call, lambda beats: beats[-1].step == 100 and not beats[-1].expected_us)
        most = (time.monotonic() - began) / QUIET_S + 3
    assert len(beats) <= most
    in_time(len(beats) > 4 and most < 100, "too slow to tell few beats from all")


async def test_a_long_step_is_announced_at_once_to_a_reader_without_news() -> None:
    readers = WatchReaders(SessionTable())
    responses = readers.open().responses()
    await anext(responses)
    readers.announce(step=1, expected_us=1_000)
    following = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    assert not following.done()
    readers.announce(step=2, expected_us=LONG_US + 1)
    assert (await asyncio.wait_for(following, 60)).beat.step == 2


def test_beats_without_news_come_less_often_to_many_readers_and_every_idle_beat_goes_out() -> None:
    readers = WatchReaders(SessionTable())
    quiet_s = []
    for _ in range(200):
        readers.open()
        quiet_s.append(readers.quiet_s)
    assert quiet_s[9] == QUIET_S < quiet_s[11] < quiet_s[-1] == MOST_QUIET_S
    assert MOST_QUIET_S < _BEAT_S


async def test_a_notice_amid_a_long_step_waits_for_the_quiet_time_and_not_for_a_beat() -> None:
    readers = WatchReaders(SessionTable())
    reader = readers.open()
    responses = reader.responses()
    await anext(responses)
    reader.request(verifier_pb2.WatchRequest(add=[unknown(3)]))
    async with asyncio.timeout(60):
        told = await anext(responses)
    assert [committed.alias for committed in told.committed] == [3]
    reader.request(verifier_pb2.WatchRequest(add=[unknown(3)]))
    readers.close(reader)
    following = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(2 * QUIET_S)
    assert not following.done(), "a reader that was closed has nothing to tell"
    following.cancel()


async def test_a_stream_that_ends_while_its_peer_is_slow_tells_all_that_came_meanwhile() -> None:
    readers = WatchReaders(SessionTable())
    reader = readers.open()
    responses = reader.responses()
    await anext(responses)  # the peer has not taken this message yet
    reader.request(verifier_pb2.WatchRequest(add=[unknown(alias) for alias in range(3)]))
    readers.close_all()
    told = [committed.alias async for response in responses for committed in response.committed]
    assert sorted(told) == [0, 1, 2]


class Watched:
    """One session and one stream with a cursor in it, on a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interval_ms: int) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("verifier_service.sessions.watch.time.monotonic", lambda: self.now_s)
        self.table = SessionTable()
        self.readers = WatchReaders(self.table)
        self.view = added(self.table)
        self.reader = self.readers.open()
        key = key_to_wire(self.view.key)
        one = verifier_pb2.Cursor(alias=1, key=key, epoch=1, position=2, interval_ms=interval_ms)
        self.reader.request(verifier_pb2.WatchRequest(add=[one]))
        self.told()

    def commit(self, *ids: int, finish: Finish | None = None, expected_us: int = 1000) -> None:
        self.table.absorb(update(self.view, *ids, finish=finish), self.now_s)
        self.readers.announce(1, expected_us)

    def told(self) -> list[int]:
        """The tokens of the next message; none where the reader would not be woken for them."""
        woken = self.reader._wake.is_set()
        self.reader._wake.clear()
        found = self.reader._collect().committed if woken else ()
        return [id_ for committed in found for id_ in committed.ids]


def test_a_cursor_with_an_interval_is_told_its_first_and_last_tokens_at_once_and_others_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched, told = Watched(monkeypatch, interval_ms=200), []
    for token in range(100):
        watched.now_s += 0.01
        watched.commit(token, finish=FINISH if token == 99 else None)
        told.append(watched.told())
    assert told[0] == [0]
    assert told[99][-1] == 99
    assert [id_ for ids in told for id_ in ids] == list(range(100))
    assert sum(map(bool, told)) == 6  # at 0, 200, 400, 600 and 800 ms, and at the end


def test_without_an_interval_every_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, interval_ms=0)
    for token in range(5):
        watched.commit(token)
        assert watched.told() == [token]


def test_tokens_that_rest_are_told_by_the_beats_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, interval_ms=200)
    watched.commit(1)
    assert watched.told() == [1]
    watched.commit(2)
    assert watched.told() == []
    watched.now_s += 0.21
    watched.readers.announce(1, 0)
    assert watched.told() == [2]


def test_before_a_long_step_only_tokens_are_told_that_would_be_due_amid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, interval_ms=1000)
    watched.commit(1)
    assert watched.told() == [1]
    watched.commit(2, expected_us=LONG_US + 1)
    assert watched.told() == []
    watched.commit(3, expected_us=2_000_000)
    assert watched.told() == [2, 3]
    watched.commit(4)
    watched.now_s += 0.5
    watched.readers.announce(1, 1000)
    assert watched.told() == [], "the interval began with the last message"


@pytest.mark.parametrize("ends", ["drain", "close_all"])
def test_nothing_rests_once_the_worker_ends(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    watched = Watched(monkeypatch, interval_ms=10_000)
    watched.commit(1)
    assert watched.told() == [1]
    watched.commit(2)
    assert watched.told() == []
    getattr(watched.readers, ends)()
    assert watched.told() == [2]
    watched.commit(3)
    assert watched.told() == [3]


def test_an_interval_beyond_the_contract_counts_as_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, interval_ms=2**32 - 1)
    watched.commit(1)
    assert watched.told() == [1]
    watched.commit(2)
    watched.now_s += 10.1
    watched.readers.announce(1, 0)
    assert watched.told() == [2]


async def test_a_session_that_was_taken_over_leaves_nothing_that_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, interval_ms=200)
    watched.commit(1)
    watched.told()
    watched.commit(2)
    watched.table.supersede(watched.view)
    assert watched.reader._resting == {}


async def test_a_stream_with_an_interval_has_every_token_once() -> None:
    target = NgramLM()
    target.step_s = 0.002
    async with serving(target) as verifier:
        request = verifier.request([1, 2], new=100)
        seldom, often = cursor(request, 2, alias=1), cursor(request, 2, alias=2)
        seldom.interval_ms = 50
        await verifier.open(request)
        call = verifier.stub.Watch()
        await call.write(verifier_pb2.WatchRequest(add=[seldom, often]))
        found: dict[int, list[int]] = {1: [], 2: []}
        ended = set()
        async with asyncio.timeout(60):
            async for response in call:
                for committed in response.committed:
                    assert committed.position == 2 + len(found[committed.alias])
                    found[committed.alias] += committed.ids
                    ended |= {committed.alias} if committed.finished else set()
                if len(ended) == 2:
                    break
    assert found[1] == found[2]
    assert len(found[1]) == 100


async def test_a_peer_that_reads_no_notices_loses_its_stream_and_nobody_elses_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verifier_service.sessions.watch.MOST_UNSENT", 2)
    async with serving(NgramLM()) as verifier:
        request = verifier.request([1, 2], new=100)
        await verifier.open(request)
        reader = verifier.server._readers.open()
        reader.request(verifier_pb2.WatchRequest(add=[cursor(request, 2, alias=9)]))
        reader.request(verifier_pb2.WatchRequest(add=[unknown(alias) for alias in range(2)]))
        await verifier.open(
            verifier.request([1, 2], new=5, epoch=request.epoch + 1, session=request.key.session)
        )
        with pytest.raises(InvalidRequest, match="read the answers"):
            await anext(reader.responses())


async def test_requests_of_watch_streams_draw_on_an_account_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(NgramLM()) as verifier:
        account, spent = verifier.server._readers.account, list[float]()
        assert account.share == WATCH_SHARE
        monkeypatch.setattr(account, "spend", lambda most_s, now: (spent.append(now), most_s)[1])
        call = verifier.stub.Watch()
        for alias in range(3):
            await call.write(verifier_pb2.WatchRequest(add=[cursor(verifier.request([1]), 1, alias=alias)]))
        await eventually(lambda: len(spent) == 3)


async def test_many_cursors_on_unknown_sessions_are_answered_in_few_messages() -> None:
    async with serving(NgramLM()) as verifier:
        call = verifier.stub.Watch()
        began = time.monotonic()
        for alias in range(200):
            await call.write(verifier_pb2.WatchRequest(add=[cursor(verifier.request([1]), 1, alias=alias)]))
        told: list[int] = []
        messages = 0
        async with asyncio.timeout(60):
            async for response in call:
                messages += 1
                told += [committed.alias for committed in response.committed]
                if len(told) == 200:
                    break
        most = (time.monotonic() - began) / QUIET_S + 3
    assert sorted(told) == list(range(200))
    assert messages <= most


async def test_a_reader_that_is_slow_gets_more_per_message_and_nothing_twice() -> None:
    target = NgramLM(max_length=2048)
    async with serving(target) as verifier:
        request = verifier.request([1, 2], new=1500)
        await verifier.open(request)
        call = verifier.stub.Watch()
        await call.write(verifier_pb2.WatchRequest(add=[cursor(request, 2)]))
        await eventually(lambda: verifier.metric("rounds_total") == 1500)
        ids: list[int] = []
        async with asyncio.timeout(60):
            async for response in call:
                for committed in response.committed:
                    assert committed.position == 2 + len(ids)
                    ids += committed.ids
                if response.committed and response.committed[-1].finished:
                    break
        assert len(ids) == 1500


async def test_an_open_stream_ends_as_unavailable_when_the_worker_stops() -> None:
    async with serving(NgramLM()) as verifier:
        call = verifier.stub.Watch()
        async with asyncio.timeout(60):
            await verifier.server.stop(0.0)
            with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
                await read_to_the_end(call)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
