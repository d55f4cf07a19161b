"""When and where a request whose orchestrator is lost is asked again."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from outrider.client.async_client import AsyncStream
from outrider.client.blocking_client import Stream
from outrider.client.completions import CompletionBuilder
from outrider.client.resuming import PAUSE_S, Resuming
from outrider.v1 import common_pb2, generation_pb2
from speculative.errors import OutriderError, QuotaExceeded, Superseded, Unavailable

LOST = Unavailable("connection reset")


def request() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(text="x"))


def test_the_next_orchestrator_is_asked_until_patience_ends() -> None:
    resuming = Resuming(request(), 2, patience_s=1.0)
    assert resuming.again(LOST, CompletionBuilder(), now=10.0) is not None
    assert resuming.orchestrator == 1
    assert resuming.again(LOST, CompletionBuilder(), now=10.9) is not None
    assert resuming.orchestrator == 0
    assert resuming.again(LOST, CompletionBuilder(), now=11.0) is None


def test_another_orchestrator_is_asked_at_once_and_each_further_one_behind_a_pause() -> None:
    several, alone = Resuming(request(), 2, patience_s=30.0), Resuming(request(), 1, patience_s=30.0)
    assert several.again(LOST, CompletionBuilder(), now=0.0) == 0.0
    assert several.again(LOST, CompletionBuilder(), now=0.1) == PAUSE_S
    several.answered()
    assert several.again(LOST, CompletionBuilder(), now=5.0) == 0.0, "of another loss"
    several.answered()
    assert several.again(LOST, CompletionBuilder(), now=5.1) == PAUSE_S, "the attempt was lost at once"
    assert alone.again(LOST, CompletionBuilder(), now=0.0) == PAUSE_S


def test_a_device_that_slept_through_its_patience_asks_anew_but_once() -> None:
    resuming, woken = Resuming(request(), 2, patience_s=30.0), 3600.0
    assert resuming.again(LOST, CompletionBuilder(), now=0.0) is not None
    assert resuming.again(LOST, CompletionBuilder(), now=woken) is not None
    assert resuming.again(LOST, CompletionBuilder(), now=woken + 29.9) is not None
    assert resuming.again(LOST, CompletionBuilder(), now=woken + 30.0) is None
    assert resuming.again(LOST, CompletionBuilder(), now=2 * woken) is None
    resuming.answered()
    assert resuming.again(LOST, CompletionBuilder(), now=2 * woken) is not None
    assert resuming.again(LOST, CompletionBuilder(), now=3 * woken) is not None, "of another loss"


def test_a_request_without_a_seed_keeps_the_one_that_is_drawn_whose_digits_every_json_reader_keeps() -> None:
    resuming = Resuming(request(), 2, patience_s=1.0)
    seed = resuming.request.start.seed
    assert seed < 2**53
    assert resuming.again(LOST, CompletionBuilder(), now=10.0) is not None
    assert resuming.request.start.seed == seed
    assert len({Resuming(request(), 2, patience_s=1.0).request.start.seed >> 48 for _ in range(40)}) > 1


def test_one_that_waits_for_nobody_is_asked_again_only_once_an_answer_has_begun() -> None:
    resuming = Resuming(request(), 2, patience_s=30.0, wait_for_ready=False)
    assert resuming.again(LOST, CompletionBuilder(), now=0.0) is None
    resuming.answered()
    assert resuming.again(LOST, CompletionBuilder(), now=0.0) is not None


def test_a_request_whose_time_is_over_is_not_asked_again() -> None:
    resuming = Resuming(request(), 2, patience_s=30.0, ends=12.0)
    assert resuming.again(LOST, CompletionBuilder(), now=11.9) is not None
    assert resuming.again(LOST, CompletionBuilder(), now=12.0) is None


def test_no_pause_that_a_full_orchestrator_asks_for_outlasts_patience_or_the_deadline() -> None:
    full = QuotaExceeded("the minute is used up", retry_after_s=59.0)
    for ends, pause_s in ((None, 30.0), (5.0, 5.0), (100.0, 30.0)):
        resuming = Resuming(request(), 2, patience_s=30.0, ends=ends)
        assert resuming.again(full, CompletionBuilder(), now=0.0) == pause_s
        assert resuming.again(full, CompletionBuilder(), now=pause_s + 0.05) is None
    assert Resuming(request(), 2, patience_s=60.0).again(full, CompletionBuilder(), now=0.0) == 59.0


def test_one_that_lost_a_race_is_not_asked_again() -> None:
    assert (
        Resuming(request(), 2, patience_s=30.0).again(Superseded("later"), CompletionBuilder(), now=0.0)
        is None
    )


def test_one_that_was_lost_before_may_take_the_session_back_once() -> None:
    resuming = Resuming(request(), 2, patience_s=30.0)
    assert resuming.again(LOST, CompletionBuilder(), now=0.0) is not None
    assert resuming.again(Superseded("by the one that was lost"), CompletionBuilder(), now=0.1) is not None
    assert resuming.again(Superseded("by somebody else"), CompletionBuilder(), now=0.2) is None


def ended(choice: int) -> generation_pb2.GenerateResponse:
    reason = common_pb2.FINISH_REASON_CANCELLED
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.GenerateFinished(choice=choice, reason=reason)
    )


def one_id(choice: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(tokens=generation_pb2.GeneratedTokens(choice=choice, ids=[5]))


def test_an_end_is_told_and_stands_whatever_comes_after_it() -> None:
    builder, resuming = CompletionBuilder(2), Resuming(request(), 2, patience_s=30.0)
    builder.add(generation_pb2.GenerateResponse(started=generation_pb2.GenerateStarted(epoch=9)))
    builder.add(ended(1))
    assert resuming.again(LOST, builder, now=0.0) is not None
    assert resuming.request.start.ended == [1]
    assert builder.add(one_id(1)) is None
    assert builder.add(one_id(0)) is not None
    assert builder.have() == [(5,), ()]


def breaks(resuming: Resuming) -> Iterator[Any]:
    """A call that is lost after its last message."""
    yield from (one_id(0), ended(1), ended(0))
    raise LOST


async def breaks_soon(resuming: Resuming) -> AsyncIterator[Any]:
    for response in breaks(resuming):
        yield response


@pytest.mark.parametrize("orchestrators", [1, 2])
async def test_an_answer_that_is_whole_is_not_asked_for_again(orchestrators: int) -> None:
    resuming = Resuming(request(), orchestrators, patience_s=30.0 if orchestrators > 1 else 0.0)
    ask: Any = breaks
    assert Stream(ask, resuming, 2).completion().ids == (5,)
    ask = breaks_soon
    assert (await AsyncStream(ask, resuming, 2).completion()).ids == (5,)
    assert resuming.orchestrator == 0


def id_at(position: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(tokens=generation_pb2.GeneratedTokens(position=position, ids=[5]))


async def breaks_off(how: str) -> AsyncIterator[Any]:
    """A call with one id that then fails, or falls silent."""
    yield id_at(0)
    if how == "fails":
        raise LOST
    await asyncio.Event().wait()


async def goes_on() -> AsyncIterator[Any]:
    for response in (id_at(1), ended(0)):
        yield response


@pytest.mark.parametrize("how", ["fails", "falls silent"])
@pytest.mark.parametrize("patience_s", [0.0, 30.0])
async def test_an_answer_whose_reader_gave_up_waiting_is_not_taken_for_whole(
    how: str, patience_s: float
) -> None:
    calls = iter((breaks_off(how), goes_on()))

    def ask(resuming: Resuming) -> Any:
        return next(calls)

    stream = AsyncStream(ask, Resuming(request(), 1, patience_s))
    await anext(stream)
    with pytest.raises((TimeoutError, Unavailable)):
        await asyncio.wait_for(anext(stream), 0.02)
    if patience_s:
        assert (await stream.completion()).ids == (5, 5), "each id once"
        return
    for _ in range(2):
        with pytest.raises(Unavailable, match="connection reset" if how == "fails" else "broke off"):
            await anext(stream)


async def test_an_error_that_is_final_stays_the_end_of_its_stream() -> None:
    asked: list[int] = []

    async def refused() -> AsyncIterator[Any]:
        if asked:
            raise Superseded("later")
        yield

    def ask(resuming: Resuming) -> Any:
        asked.append(resuming.orchestrator)
        return refused()

    stream = AsyncStream(ask, Resuming(request(), 2, patience_s=30.0))
    for _ in range(2):
        with pytest.raises(Superseded):
            await anext(stream)
    assert asked == [0]


class FullCall:
    """A call that an orchestrator without room has refused, for a minute."""

    def __init__(self) -> None:
        self.read = threading.Event()

    def __iter__(self) -> "FullCall":
        return self

    def __next__(self) -> Any:
        self.read.set()
        raise QuotaExceeded("the minute is used up", retry_after_s=59.0)

    def __aiter__(self) -> "FullCall":
        return self

    async def __anext__(self) -> Any:
        return next(self)

    def cancel(self) -> None:
        pass


async def test_a_stream_that_is_closed_between_two_attempts_ends_and_is_not_asked_for_again() -> None:
    call, asked = FullCall(), list[int]()

    def ask(resuming: Resuming) -> Any:
        asked.append(resuming.orchestrator)
        return call

    blocking = Stream(ask, Resuming(request(), 2, patience_s=60.0))
    reading = asyncio.create_task(asyncio.to_thread(next, blocking))
    await asyncio.to_thread(call.read.wait, 60)
    blocking.close()
    with pytest.raises(OutriderError, match="was closed"):
        await asyncio.wait_for(reading, 20)
    call.read.clear()
    stream = AsyncStream(ask, Resuming(request(), 2, patience_s=60.0))
    reads = asyncio.create_task(stream.completion())
    await asyncio.to_thread(call.read.wait, 60)
    stream.close()
    with pytest.raises(OutriderError, match="was closed"):
        await asyncio.wait_for(reads, 20)
    assert asked == [0, 0]
