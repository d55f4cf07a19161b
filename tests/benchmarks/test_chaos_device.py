"""The devices of a chaos run do what their faults say, once each."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.chaos import device
from benchmarks.chaos.device import LOST_AFTER, DeviceCall, DeviceFault, first_difference_of
from outrider.v1 import generation_pb2
from speculative.errors import Unavailable
from speculative.hashing import prefix_hash

GOLDEN = tuple(range(1, 41))
PROMPT = 3


class FakeCall:
    """Answers with the golden ids, one a message, and keeps what the device writes."""

    def __init__(self, wrong_at: int = -1) -> None:
        self.written: list[generation_pb2.GenerateRequest] = []
        self.cancelled = False
        self._wrong_at = wrong_at

    async def write(self, request: generation_pb2.GenerateRequest) -> None:
        self.written.append(generation_pb2.GenerateRequest.FromString(request.SerializeToString()))

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(started=generation_pb2.GenerateStarted(epoch=5))
        for at in range(PROMPT, len(GOLDEN)):
            id_ = GOLDEN[at] + (at == self._wrong_at)
            yield generation_pb2.GenerateResponse(
                tokens=generation_pb2.GeneratedTokens(position=at, ids=[id_])
            )


async def run(fault: DeviceFault) -> tuple[FakeCall, int, bool]:
    """The call, how often the fault happened, and whether the stream was lost."""
    call, happened = FakeCall(), []
    request = generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(seed=1))
    try:
        async for _ in DeviceCall(call, request, GOLDEN, fault, lambda: happened.append(fault)):
            pass
    except Unavailable:
        return call, len(happened), True
    return call, len(happened), False


def windows(call: FakeCall) -> list[Any]:
    return [request.drafts for request in call.written if request.HasField("drafts")]


@pytest.mark.parametrize("fault", [DeviceFault.VANISHES, DeviceFault.SLEEPS, DeviceFault.TWICE])
async def test_a_device_loses_its_connection_once_behind_some_windows(
    fault: DeviceFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ASLEEP_S", 0.0)
    call, happened, lost = await run(fault)
    assert (happened, lost, call.cancelled) == (1, True, True)
    assert len(windows(call)) == LOST_AFTER


async def test_a_device_that_replays_sends_windows_again() -> None:
    call, happened, lost = await run(DeviceFault.REPLAYS)
    bases = [window.base for window in windows(call)]
    assert (happened, lost) == (1, False)
    assert len(bases) > len(set(bases)), "some went out twice"


async def test_a_device_that_claims_drafts_behind_another_text_and_asks_for_its_session() -> None:
    call, happened, _ = await run(DeviceFault.CLAIMS)
    own = {prefix_hash(GOLDEN[:base]) for base in range(len(GOLDEN))}
    assert happened == 1
    assert all(window.prefix_hash not in own for window in windows(call))
    assert [request.start.session for request in call.written if request.HasField("start")][1:] == [
        "chaos-0-0"
    ]


async def test_a_device_without_a_fault_keeps_to_the_rules() -> None:
    call, happened, lost = await run(DeviceFault.NONE)
    assert (happened, lost) == (0, False)
    assert [window.prefix_hash for window in windows(call)] == [
        prefix_hash(GOLDEN[: window.base]) for window in windows(call)
    ]


@pytest.mark.parametrize(("wrong_at", "found"), [(-1, None), (10, (10, (12,)))])
async def test_the_second_of_two_streams_is_compared_token_by_token(wrong_at: int, found: object) -> None:
    request = generation_pb2.GenerateRequest(start=generation_pb2.GenerateStart(seed=1))
    call = DeviceCall(FakeCall(wrong_at), request, GOLDEN)
    assert await first_difference_of(call, GOLDEN) == found
