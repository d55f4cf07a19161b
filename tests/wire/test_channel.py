"""Both ends agree on pings, and a frozen peer is noticed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc, verifier_pb2
from outrider.wire.channel import (
    DEFAULT_MESSAGE_MB,
    PING_MS,
    QUICK_PING_MS,
    channel_options,
    least_message_mb,
    open_channel,
    server_options,
    sync_channel,
)
from outrider.wire.codec import WHOLE_ANSWER_INTERVAL_MS
from outrider.wire.status import rpc_errors
from speculative.errors import InvalidRequest, OutriderError
from tests.in_time import in_time

ROOT = Path(__file__).parents[2]
SERVER = """
import asyncio, grpc.aio
from outrider.v1 import generation_pb2 as pb, generation_pb2_grpc as stubs
from outrider.wire.channel import server_options

class Silent(stubs.GenerationServicer):
    async def Generate(self, requests, context):
        yield pb.GenerateResponse()
        await asyncio.sleep(600)

async def main():
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    stubs.add_GenerationServicer_to_server(Silent(), server)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""


async def test_a_burst_of_pings_does_not_end_a_connection() -> None:
    """gRPC's own probes arrive in bunches on a busy machine."""
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    answer = ping[:4] + b"\x01" + ping[5:]
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + ping * 50)
    received = b""
    async with asyncio.timeout(60):
        while received.count(answer) < 50:
            received += (part := await reader.read(4096))
            assert part, f"hung up after {received!r}"
    assert b"too_many_pings" not in received
    writer.close()
    await writer.wait_closed()
    await server.stop(None)


def test_the_receiver_bounds_messages() -> None:
    for options in (server_options(), channel_options()):
        assert dict(options)["grpc.max_receive_message_length"] == 8 * 1024 * 1024
        assert dict(options)["grpc.max_send_message_length"] == -1
    assert dict(channel_options(64))["grpc.max_receive_message_length"] == 64 * 1024 * 1024


@pytest.mark.parametrize("takes_mb", [32, 64])
async def test_a_server_with_a_higher_bound_accepts_larger_messages_and_others_refuse(takes_mb: int) -> None:
    server = grpc.aio.server(options=server_options(takes_mb))
    port = server.add_insecure_port("127.0.0.1:0")
    nothing = generation_pb2_grpc.GenerationServicer()  # type: ignore[abstract]  # answers UNIMPLEMENTED
    generation_pb2_grpc.add_GenerationServicer_to_server(nothing, server)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(OutriderError) as failed, rpc_errors():
            await stub.Cancel(generation_pb2.CancelRequest(session="x" * (33 * 2**20)), timeout=100)
    await server.stop(None)
    assert ("UNIMPLEMENTED" if takes_mb == 64 else "too large") in str(failed.value)
    assert isinstance(failed.value, InvalidRequest) == (takes_mb == 32)


async def test_a_larger_message_than_that_is_refused_and_the_channel_lives_on() -> None:
    server = grpc.aio.server(options=server_options(max_message_mb=1))
    port = server.add_insecure_port("127.0.0.1:0")
    nothing = generation_pb2_grpc.GenerationServicer()  # type: ignore[abstract]  # answers UNIMPLEMENTED
    generation_pb2_grpc.add_GenerationServicer_to_server(nothing, server)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Cancel(generation_pb2.CancelRequest(session="x" * 2**21), timeout=100)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Cancel(generation_pb2.CancelRequest(), timeout=100)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


@pytest.fixture
def silent_server() -> Iterator["subprocess.Popen[bytes]"]:
    """A server that answers each stream once and then leaves it open."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=env, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def address_of(server: "subprocess.Popen[bytes]") -> str:
    """The address that a server prints once it answers."""
    assert server.stdout is not None
    return f"127.0.0.1:{int(server.stdout.readline())}"


@pytest.mark.slow
async def test_a_silent_stream_lives_and_a_frozen_peer_is_noticed(
    silent_server: "subprocess.Popen[bytes]",
) -> None:
    address = address_of(silent_server)
    async with open_channel(address) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate()
        await call.read()
        waiting = asyncio.ensure_future(call.read())
        silence_s = 4 * PING_MS / 1000  # by default the third ping would end it
        done, _ = await asyncio.wait((waiting,), timeout=silence_s)
        assert not done, f"the stream ended within {silence_s} s"
        silent_server.send_signal(signal.SIGSTOP)
        frozen = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(waiting, 40)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        in_time(time.monotonic() - frozen < 30)


def test_little_patience_means_frequent_pings() -> None:
    """A frozen peer is lost after the time between two pings and the time for an answer."""
    quick, usual = dict(channel_options(patience_ms=450)), dict(channel_options(patience_ms=10_000))
    assert (quick["grpc.keepalive_time_ms"], quick["grpc.keepalive_timeout_ms"]) == (QUICK_PING_MS, 450)
    assert (usual["grpc.keepalive_time_ms"], usual["grpc.keepalive_timeout_ms"]) == (PING_MS, 10_000)
    assert QUICK_PING_MS > WHOLE_ANSWER_INTERVAL_MS, "an answer's messages leave no time for pings"


@pytest.mark.parametrize("vocabulary", [100, 16_384, 16_385, 128_256, 2_097_152])
@pytest.mark.parametrize("context", [512, 131_072, 1_000_000])
def test_the_largest_open_of_a_context_fits_the_least_limit(context: int, vocabulary: int) -> None:
    ids = [vocabulary - 1] * context
    request = verifier_pb2.OpenRequest(ids=ids, prediction=ids[1:])
    bytes_without_ids = 2**17
    assert request.ByteSize() + bytes_without_ids <= least_message_mb(context, vocabulary) * 2**20


def test_the_default_limit_holds_a_context_of_a_million_tokens() -> None:
    assert least_message_mb(1_354_410, 128_256) <= DEFAULT_MESSAGE_MB < least_message_mb(1_354_411, 128_256)


def test_an_interrupt_that_left_a_lock_held_does_not_keep_the_channel_s_user(
    silent_server: "subprocess.Popen[bytes]",
) -> None:
    call: Any = None

    def read_on() -> None:
        with suppress(grpc.RpcError):
            next(call)

    with suppress(KeyboardInterrupt), sync_channel(address_of(silent_server)) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(iter([generation_pb2.GenerateRequest()]))
        next(call)
        threading.Thread(target=read_on).start()
        while len(call._state.due) < 2:  # of two events that closing waits for, the first takes the lock
            time.sleep(0.001)
        call._state.condition.acquire()  # as where an interrupt comes right behind this
        raise KeyboardInterrupt
    (closing,) = [thread for thread in threading.enumerate() if "interrupt" in thread.name]
    call._state.condition.release()
    closing.join(60)
    assert not closing.is_alive()
    assert call.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("error", [None, ValueError("of the caller")], ids=["none", "an error"])
def test_a_channel_is_closed_when_its_block_is_left(
    error: Exception | None, silent_server: "subprocess.Popen[bytes]"
) -> None:
    with suppress(ValueError), sync_channel(address_of(silent_server)) as channel:
        call = generation_pb2_grpc.GenerationStub(channel).Generate(iter([generation_pb2.GenerateRequest()]))
        next(call)
        if error is not None:
            raise error
    assert call.code() is grpc.StatusCode.CANCELLED
