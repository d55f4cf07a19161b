"""Calls under way at a verifier that may be given up, or leave, before it answers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.fleet.liveness import LivenessJudge
from orchestrator.fleet.verifier_link import VerifierLink, VerifierLost
from outrider.v1 import verifier_pb2
from outrider.wire.codec import MAX_NAME, SessionKey
from speculative.errors import StaleEpoch, Unavailable
from tests.orchestrator.conftest import FakeVerifier, World

ANSWER = verifier_pb2.OpenResponse(source_names=["lookup"])


class Stub:
    """A verifier whose Open answers as the test sets it."""

    def __init__(self, answer: Callable[[], Awaitable[verifier_pb2.OpenResponse]]) -> None:
        self.answer = answer
        self.described = 0

    async def Open(self, message: verifier_pb2.OpenRequest, **how: Any) -> verifier_pb2.OpenResponse:
        return await self.answer()

    async def Describe(self, message: verifier_pb2.VerifierDescribeRequest, **how: Any) -> Any:
        self.described += 1
        raise RuntimeError("a fault")


async def link_to(answer: Callable[[], Awaitable[verifier_pb2.OpenResponse]]) -> VerifierLink:
    link: Any = VerifierLink("127.0.0.1:1")
    link.has_peer = lambda: True
    await link._channel.close()
    link._stub = Stub(answer)
    opened: VerifierLink = link
    return opened


def opening(link: VerifierLink) -> Awaitable[verifier_pb2.OpenResponse]:
    return link.open(verifier_pb2.OpenRequest(), 60.0)


async def later() -> verifier_pb2.OpenResponse:
    await asyncio.sleep(0.01)
    return ANSWER


async def test_an_answer_and_an_error_come_as_they_are() -> None:
    async def refused() -> verifier_pb2.OpenResponse:
        await asyncio.sleep(0.01)
        raise StaleEpoch("old", 9)

    assert await opening(await link_to(later)) == ANSWER
    with pytest.raises(StaleEpoch):
        await opening(await link_to(refused))
    link = await link_to(later)
    link._give_up("is gone")
    assert await opening(link) == ANSWER, "what begins afterwards has its own chance"


async def test_nobody_waits_for_a_peer_that_is_given_up() -> None:
    async def never() -> verifier_pb2.OpenResponse:
        await asyncio.Event().wait()
        return ANSWER

    link = await link_to(never)
    waiting = [asyncio.ensure_future(opening(link)) for _ in range(2)]
    await asyncio.sleep(0)
    link._give_up("is frozen")
    link._give_up("is frozen again")
    for task in waiting:
        with pytest.raises(Unavailable, match=r"127.0.0.1:1 is frozen$"):
            await task


async def test_a_verifier_without_a_peer_may_be_back_in_time() -> None:
    link = await link_to(later)
    link.has_peer = lambda: False
    task = asyncio.ensure_future(opening(link))
    await asyncio.sleep(0)
    link._give_up("is frozen")
    assert await task == ANSWER


async def test_a_caller_that_goes_away_cancels_its_call() -> None:
    ended: list[str] = []

    async def endless() -> verifier_pb2.OpenResponse:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("call")
        return ANSWER

    task = asyncio.ensure_future(opening(await link_to(endless)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert ended == ["call"]


Call = Callable[[VerifierLink], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "open": lambda link: link.open(verifier_pb2.OpenRequest(), 60.0),
    "cancel": lambda link: link.cancel(SessionKey("", "mine"), 1),
    "explain": lambda link: link.explain(SessionKey("", "mine"), nodes=False),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


class Hanging(FakeVerifier):
    """A verifier that answers nothing but Describe; `asked` counts the calls under way."""

    asked = 0

    async def _hang(self, request: Any, context: Any) -> Any:
        self.asked += 1
        await asyncio.Event().wait()

    Open = Cancel = Explain = _hang


async def hung_up(running: asyncio.Task[None]) -> None:
    """Ends a link as its fleet does once the verifier is gone from the registry."""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@each_call
async def test_a_call_under_way_fails_once_the_link_has_hung_up(world: World, call: Call) -> None:
    """Its caller is not cancelled, and may ask another verifier."""
    verifier = Hanging()
    await world.serve(verifier)
    link = VerifierLink(verifier.address)
    running = asyncio.create_task(link.run())
    calling, leaving = asyncio.ensure_future(call(link)), asyncio.ensure_future(call(link))
    await world.until(lambda: verifier.asked == 2)
    leaving.cancel()
    await hung_up(running)
    with pytest.raises(Unavailable, match="has left"):
        await calling
    with pytest.raises(asyncio.CancelledError):
        await leaving


@each_call
async def test_a_call_that_comes_once_the_link_has_hung_up_fails(call: Call) -> None:
    link = VerifierLink("127.0.0.1:1")
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    await hung_up(running)
    with pytest.raises(Unavailable, match=r"127.0.0.1:1 has left$"):
        await call(link)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not happened():  # noqa: ASYNC110  # nothing sets an event
            await asyncio.sleep(0.01)


async def test_a_fault_in_dialling_is_told_and_the_link_dials_again(caplog: pytest.LogCaptureFixture) -> None:
    link: Any = await link_to(later)
    running = asyncio.create_task(link.run())
    await until(lambda: running.done() or link._stub.described >= 2)
    assert not running.done()
    assert "verifier link failed" in caplog.messages
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_fault_in_a_check_is_told_and_a_silent_verifier_given_up_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = [RuntimeError("a fault")]

    def has_peer() -> bool:
        if faults:
            raise faults.pop()
        return True

    link: Any = await link_to(later)
    link._judge = LivenessJudge(0.0, silent_s=0.01, stalled_s=0.01)
    link.has_peer = has_peer
    reader = link.read(SessionKey("", "mine"), 1, 1, asyncio.Event())
    guard = asyncio.create_task(link._guard())
    await until(lambda: guard.done() or reader.error is not None)
    assert isinstance(reader.error, VerifierLost)
    assert "a verifier was not checked" in caplog.messages
    guard.cancel()


async def test_a_probe_that_nobody_answers_holds_no_check_up() -> None:
    link: Any = await link_to(later)
    probes: list[float] = []

    async def never(message: verifier_pb2.VerifierDescribeRequest, **how: Any) -> Any:
        probes.append(how["timeout"])
        await asyncio.Event().wait()

    link._stub.Describe = never
    now = time.monotonic()
    link._judge = LivenessJudge(now - 0.45)
    reader = link.read(SessionKey("", "mine"), 1, 1, asyncio.Event())
    await link._check(now)
    await link._check(now)
    await asyncio.sleep(0)
    assert probes == [link._patience.silent_s / 2], "one probe at a time"
    assert reader.error is None
    link._judge = LivenessJudge(now - 0.65)
    await link._check(now)
    assert isinstance(reader.error, VerifierLost)
    (probe,) = link._background
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert not link._is_probing


async def test_a_start_waits_for_no_verifier_that_has_left() -> None:
    link: Any = await link_to(later)

    async def never(message: verifier_pb2.VerifierDescribeRequest, **how: Any) -> Any:
        await asyncio.Event().wait()

    link._stub.Describe = never
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert link.first_attempt_done.is_set()


class Written:
    """A Watch call that takes everything down."""

    def __init__(self) -> None:
        self.requests: list[verifier_pb2.WatchRequest] = []

    async def write(self, request: verifier_pb2.WatchRequest) -> None:
        self.requests.append(request)


async def test_a_watch_that_names_very_many_sessions_does_so_in_several_messages() -> None:
    link = await link_to(later)
    wake, call = asyncio.Event(), Written()
    keys = [SessionKey("t" * MAX_NAME, f"{number:0{MAX_NAME}}") for number in range(4_000)]
    writer = asyncio.create_task(link._send_changes(call))
    known = [link.read(key, 1 << 60, 1 << 20, wake) for key in keys[:2_000]]
    await told()
    call.requests.clear()
    for reader in known:
        link.leave(reader)
    expected = {link.read(key, 1 << 60, 1 << 20, wake).alias for key in keys[2_000:]}
    await told()
    writer.cancel()
    assert expected == {cursor.alias for request in call.requests for cursor in request.add}
    assert sum(len(request.drop) for request in call.requests) == 2_000
    assert max(request.ByteSize() for request in call.requests) < 2**18
    first_add = next(place for place, request in enumerate(call.requests) if request.add)
    assert not [request for request in call.requests[first_add:] if request.drop], "drops come first"


async def test_a_verifier_never_hears_of_a_reader_that_left_before_it_was_named() -> None:
    link = await link_to(later)
    wake, call = asyncio.Event(), Written()
    stays, leaves = [link.read(SessionKey("", name), 1, 1, wake) for name in ("stays", "leaves")]
    link.leave(leaves)
    writer = asyncio.create_task(link._send_changes(call))
    await told()
    link.leave(stays)
    await told()
    writer.cancel()
    named = [([it.alias for it in request.add], list(request.drop)) for request in call.requests]
    assert named == [([stays.alias], []), ([], [stays.alias])]


async def told() -> None:
    """Returns once the writer has written what changed."""
    for _ in range(100):
        await asyncio.sleep(0)
