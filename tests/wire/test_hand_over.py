"""Messages that have arrived are copied in turn: many large ones leave the loop to others."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.channel import server_options
from outrider.wire.incoming.hand_over import (
    BYTE_S,
    MOST_DEBTORS,
    PAUSE,
    SHARE,
    Debts,
    HandOver,
    MessageSender,
)
from outrider.wire.incoming.unparsed import Unparsed, unparsed
from outrider.wire.status import guarded
from tests.in_time import in_time

MB = 2**20
MAD = MessageSender("ipv4:10.0.0.1", "ipv4:10.0.0.1:1001", 1)
CALM = MessageSender("ipv4:10.0.0.2", "ipv4:10.0.0.2:1002", 2)
CALLS = 24
SENDER = f"""
import sys, threading, grpc
address, method = sys.argv[1:]
data, told = bytes(4 * {MB} - 100), threading.Event()
def messages():
    told.wait()
    yield data
with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
    call = channel.stream_unary("/outrider.v1.Generation/" + method)
    made = [call.future(messages(), timeout=60) for _ in range({CALLS})]
    sys.stdin.readline()
    told.set()
    print([each.code().name for each in made].count("INVALID_ARGUMENT"))
"""
"""A process that opens calls, and sends a large message on each of them when it gets a line: its own work is
not on the loop that is measured."""


class Arrivals:
    """Messages that arrive when a test says so, and the order in which they are copied."""

    def __init__(self) -> None:
        self.copied: list[str] = []

    async def message(self, name: str, size: int, arrived: "asyncio.Future[None]") -> Unparsed[Any]:
        """A message as gRPC hands it over: copied by the task that waits for it."""
        await arrived
        self.copied.append(name)
        return Unparsed(bytes(size), generation_pb2.CancelRequest, name)


def soon() -> "asyncio.Future[None]":
    """A message's arrival, which comes after whatever waits for it has begun to wait."""
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    loop.call_soon(loop.call_soon, arrived.set_result, None)
    return arrived


def test_a_debt_is_paid_off_with_the_time() -> None:
    debts = Debts()
    debts.add(MAD, 0.010, now=5.0)
    assert debts.of(MAD, now=5.0) == pytest.approx(3 * 0.010 / SHARE)
    assert debts.of(MAD, now=5.0 + 0.010 / SHARE) == 0.0
    assert debts.of(CALM, now=5.0) == 0.0


def test_new_credentials_and_new_connections_do_not_rid_a_sender_of_its_debts() -> None:
    debts = Debts()
    debts.add(MAD, 0.010, now=5.0)
    neighbour = MessageSender(MAD.host, "ipv4:10.0.0.1:1003", 3)
    invented, dialled = neighbour._replace(connection=MAD.connection), MAD._replace(connection="x:1")
    owes = debts.of(neighbour, now=5.0)
    assert 0.0 < owes < debts.of(invented, now=5.0) < debts.of(MAD, now=5.0)
    assert owes < debts.of(dialled, now=5.0)


def test_debts_that_are_paid_take_no_memory() -> None:
    debts = Debts()
    for number in range(3 * MOST_DEBTORS):
        debts.add(MessageSender(f"ipv4:10.0.0.{number}", f"{number}", number), 0.001, now=float(number))
    assert len(debts._even_at) <= MOST_DEBTORS + 3


async def test_a_small_message_comes_before_the_large_ones_that_another_caller_sent_first() -> None:
    arrivals, order, loop = Arrivals(), HandOver(), asyncio.get_running_loop()
    arrived: list[asyncio.Future[None]] = [loop.create_future() for _ in range(9)]
    taking = [
        asyncio.create_task(order.take(arrivals.message(f"large {number}", 8 * MB, arrived[number]), MAD))
        for number in range(8)
    ]
    taking.append(asyncio.create_task(order.take(arrivals.message("small", 10, arrived[8]), CALM)))
    await asyncio.sleep(0)
    for each in arrived:
        each.set_result(None)
    async with asyncio.timeout(60):
        messages = await asyncio.gather(*taking)
    in_time(arrivals.copied.index("small") == 1, arrivals.copied)
    assert sorted(arrivals.copied) == sorted(message.method for message in messages)


async def test_a_large_message_has_a_pause_behind_it_and_a_small_one_has_none() -> None:
    arrivals, order = Arrivals(), HandOver()
    began = time.monotonic()
    for number in range(100):
        await order.take(arrivals.message(f"small {number}", 100, soon()), MAD)
    assert order._free_at == 0.0
    await order.take(arrivals.message("large", MB, soon()), MAD)
    assert order._free_at - began >= PAUSE * MB * BYTE_S
    await order.take(arrivals.message("next", 100, soon()), MAD)
    assert time.monotonic() >= order._free_at


async def test_a_message_whose_call_ended_while_it_waited_is_freed_and_holds_up_nobody() -> None:
    arrivals, order = Arrivals(), HandOver()
    taking = [
        asyncio.create_task(order.take(arrivals.message(name, MB, soon()), MAD)) for name in ("a", "b", "c")
    ]
    await taking[0]
    taking[1].cancel()
    async with asyncio.timeout(60):
        ended = await asyncio.gather(*taking, return_exceptions=True)
    assert isinstance(ended[1], asyncio.CancelledError)
    assert arrivals.copied == ["a", "b", "c"]  # the copy alone frees what gRPC holds
    assert not order._waiting


async def test_the_end_of_a_stream_and_an_error_pass_through() -> None:
    async def ending() -> Unparsed[Any]:
        await asyncio.sleep(0)
        raise StopAsyncIteration

    async def failing() -> Unparsed[Any]:
        await asyncio.sleep(0)
        raise grpc.aio.UsageError("closed")

    order = HandOver()
    with pytest.raises(StopAsyncIteration):
        await order.take(ending(), MAD)
    with pytest.raises(grpc.aio.UsageError):
        await order.take(failing(), MAD)
    assert not order._taken


async def test_a_wait_for_a_message_can_be_cancelled() -> None:
    arrivals, order = Arrivals(), HandOver()
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    taking = asyncio.create_task(order.take(arrivals.message("a", 1, never), MAD))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert never.cancelled()
    assert not arrivals.copied


async def test_a_message_that_arrives_as_its_call_ends_is_freed() -> None:
    arrivals, order = Arrivals(), HandOver()
    arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    taking = asyncio.create_task(order.take(arrivals.message("a", 1, arrived), MAD))
    await asyncio.sleep(0)
    arrived.set_result(None)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert arrivals.copied == ["a"]  # the copy alone frees what gRPC holds


class Servicer(generation_pb2_grpc.GenerationServicer):
    """Methods that look at nothing but their request's size."""

    @guarded
    async def Generate(  # type: ignore[override]  # of grpc.aio's two styles the one that iterates
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        async for _ in requests:
            yield generation_pb2.GenerateResponse()

    @guarded
    async def Cancel(self, request: generation_pb2.CancelRequest, context: Any) -> Any:
        return generation_pb2.CancelResponse(found=True)


class Counted(grpc.aio.ServerInterceptor):
    """Tells when so many calls have come."""

    def __init__(self) -> None:
        self.left = CALLS
        self.all = asyncio.Event()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The call's own handler."""
        self.left -= 1
        if not self.left:
            self.all.set()
        return await continuation(handler_call_details)


@asynccontextmanager
async def serving(*interceptors: grpc.aio.ServerInterceptor) -> AsyncIterator[str]:
    """The address of a server of these methods."""
    server = grpc.aio.server(options=server_options(8), interceptors=interceptors)
    generation_pb2_grpc.add_GenerationServicer_to_server(Servicer(), unparsed(server))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def longest_between_turns(ending: "asyncio.Task[Any]") -> float:
    """The most processor time of the loop's thread between two turns of a task that always wants one."""
    longest, last = 0.0, time.thread_time()
    while not ending.done():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    return longest


@pytest.mark.parametrize("method", ["Generate", "Cancel"])
async def test_large_messages_that_arrived_together_leave_the_loop_to_others(method: str) -> None:
    counted, pipe = Counted(), asyncio.subprocess.PIPE
    async with asyncio.timeout(120), serving(counted) as address:
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SENDER, address, method, stdin=pipe, stdout=pipe
        )
        await counted.all.wait()
        answering = asyncio.create_task(sender.communicate(b"go\n"))
        await asyncio.sleep(0.01)
        time.sleep(2.0)  # noqa: ASYNC251  # the loop stands still while all messages arrive
        longest_s = await longest_between_turns(answering)
        said, _ = await answering
    assert int(said) == CALLS
    in_time(longest_s < 0.040, f"{1e3 * longest_s:.0f} ms of the loop's thread without a turn for others")


@pytest.mark.parametrize("method", ["Generate", "Cancel"])
async def test_a_message_that_grpc_refuses_leaves_no_trace_in_the_log(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    unlimited = [("grpc.max_send_message_length", -1)]
    async with serving() as address, grpc.aio.insecure_channel(address, options=unlimited) as channel:
        call: Any = channel.stream_unary(f"/outrider.v1.Generation/{method}")
        for _ in range(8):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(iter((bytes(9 * MB),)))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        once: Any = channel.unary_unary("/outrider.v1.Generation/Cancel")
        assert generation_pb2.CancelResponse.FromString(await once(b"")).found
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_call_of_one_request_that_brings_none_is_refused() -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_unary("/outrider.v1.Generation/Cancel")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(iter(()))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no message" in str(caught.value.details())
        once: Any = channel.unary_unary("/outrider.v1.Generation/Cancel")
        assert generation_pb2.CancelResponse.FromString(await once(b"")).found
