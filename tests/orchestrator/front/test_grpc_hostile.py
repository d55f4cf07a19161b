"""What one gRPC client sends is not felt by another: junk, and messages that would be dear to parse.

The client runs in a process of its own, so that this process's event loop does the server's work alone.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.wire.incoming.malformed import MALFORMED
from tests.in_time import each_in_time, in_time
from tests.loop_time import longest_callback
from tests.orchestrator.fronts import write_keys
from tests.traces import traces

JUNK = b"\xff\xff\xff\xff"
METHODS = ("Generate", "Cancel", "Explain", "ListModels")
SENDER = """
import sys, grpc
address = sys.argv[1]
options = [("grpc.max_send_message_length", -1)]
with grpc.insecure_channel(address, options=options) as channel:
    for line in sys.stdin:
        method, body, key = eval(line)
        data = eval(body)
        path = "/outrider.v1.Generation/" + method
        call = channel.stream_stream(path) if method == "Generate" else channel.unary_unary(path)
        metadata = (("authorization", "Bearer " + key),) if key else ()
        try:
            if method == "Generate":
                list(call(iter([data]), metadata=metadata, timeout=60))
            else:
                call(data, metadata=metadata, timeout=60)
            print("OK", "", flush=True)
        except grpc.RpcError as error:
            print(error.code().name, error.details().replace("\\n", " "), flush=True)
"""
FIELDS = """
def field(number, body):
    return varint(number << 3 | 2) + varint(len(body)) + body
def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])
"""

DEAR = {
    "30 MB of logit_bias": "field(1, field(6, field(8, b'\\x08\\x05') * 7_500_000))",
    "18 MB of stop_ids": "field(1, field(6, field(11, b'\\x05' * 18_000_000)))",
    "12 MB of have": "field(1, field(16, field(1, b'\\x05' * 12_000_000)))",
    "7 MB of logit_bias": "field(1, field(6, field(8, b'\\x08\\x05') * 1_700_000))",
    "7 MB of stop_ids": "field(1, field(6, field(11, b'\\x05' * 7_000_000)))",
    "7 MB of have": "field(1, field(16, field(1, b'\\x05' * 7_000_000)))",
    "7 MB of empty haves": "field(1, field(16, b'') * 2_300_000)",
    "7 MB of prompt ids": "field(1, field(5, field(1, b'\\x05' * 7_000_000)))",
    "7 MB of text": "field(1, field(4, b'a' * 7_000_000))",
    "7 MB of starts": "field(1, b'') * 3_500_000",
    "60 kB of stop_ids": "field(1, field(6, field(11, b'\\x05' * 60_000)))",
    "60 kB of empty haves": "field(1, field(16, b'') * 20_000)",
    "60 kB of prompt ids": "field(1, field(5, field(1, b'\\x05' * 60_000)))",
    "60 kB of biases": "field(1, field(6, b''.join(field(8, b'\\x08' + varint(i)) for i in range(9000))))",
}


class Caller:
    """A process that calls a front: its own work is not on the loop that is measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self, method: str, body: str, key: str = "") -> tuple[str, str]:
        """Status and message of a call with these bytes, an expression of Python, as its only message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{(method, body, key)!r}\n".encode())
        code, _, details = (await self._process.stdout.readline()).decode().strip().partition(" ")
        return code, details


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[Caller]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FIELDS + SENDER, address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Caller(process)
    finally:
        process.kill()
        await process.wait()


async def test_bytes_that_are_no_protobuf_are_an_invalid_argument(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    async with calling(front.address) as caller:
        for method in METHODS:
            counted = MALFORMED.counts[f"outrider.v1.Generation/{method}"]
            with caplog.at_level(logging.WARNING):
                code, details = await caller.answer(method, repr(JUNK))
            assert code == "INVALID_ARGUMENT"
            assert "4 bytes that are no outrider.v1." in details
            assert f"send what outrider.v1.Generation/{method} takes" in details
            assert MALFORMED.counts[f"outrider.v1.Generation/{method}"] == counted + 1
    assert not traces(caplog)
    lines = [record for record in caplog.records if "malformed message" in record.message]
    in_time(len(lines) <= 2, "one a second at most")


async def test_the_key_is_asked_for_before_a_message_is_read(world: Any, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", ["acme"])
    verifier = await world.verifier()
    front = await world.front([verifier.address], api_keys_file=tmp_path / "keys")
    before = MALFORMED.counts.total()
    async with calling(front.address) as caller:
        for method in METHODS:
            code, details = await caller.answer(method, repr(JUNK))
            assert (code, "no API key" in details) == ("UNAUTHENTICATED", True), method
    assert MALFORMED.counts.total() == before


async def test_a_key_without_quota_is_told_so_before_its_message_is_read(world: Any, tmp_path: Path) -> None:
    [key] = write_keys(tmp_path / "keys", ["acme"], requests_per_minute=1)
    verifier = await world.verifier()
    front = await world.front([verifier.address], api_keys_file=tmp_path / "keys")
    await world.until(front.service._fleet.served)
    async with calling(front.address) as caller:
        codes = [(await caller.answer("Generate", repr(JUNK), key))[0] for _ in range(2)]
    assert codes == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]


@pytest.mark.slow
async def test_a_dear_message_costs_the_loop_less_than_20_ms_at_a_time(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    async with calling(front.address) as caller:

        async def check(what: str) -> None:
            with longest_callback() as longest:
                code, details = await caller.answer("Generate", DEAR[what])
            assert code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"), details
            in_time(longest.ms < 20, longest)

        await each_in_time(check, DEAR)


async def test_unary_methods_refuse_large_messages_by_their_size(world: Any) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    async with calling(front.address) as caller:
        for method in ("Cancel", "Explain", "ListModels"):
            with longest_callback() as longest:
                code, details = await caller.answer(method, "field(1, b'x' * 7_000_000)")
            assert code == "INVALID_ARGUMENT"
            assert "bytes; at most 65536 are read here" in details
            in_time(longest.ms < 20, longest)


async def test_messages_behind_the_first_are_not_read(world: Any) -> None:
    verifier = await world.verifier(per_tick=1, tick_s=0.01)
    front = await world.ready(await world.front([verifier.address]))
    stream = front.client.stream(ids=[5], max_tokens=20)
    with longest_callback() as longest:
        async with grpc.aio.insecure_channel(front.address) as channel:
            from outrider.v1 import generation_pb2

            first = generation_pb2.GenerateRequest(
                start=generation_pb2.GenerateStart(ids=generation_pb2.TokenIds(ids=[5]), max_tokens=20)
            )
            call = channel.stream_stream("/outrider.v1.Generation/Generate")()
            await call.write(first.SerializeToString())
            await call.write(JUNK * 100_000)
            assert [message async for message in call]
    assert (await stream.completion()).finish_reason == "length"
    in_time(longest.ms < 20, longest)


def texts(records: Sequence[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


async def test_many_malformed_messages_are_one_line_of_the_log(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    verifier = await world.verifier()
    front = await world.ready(await world.front([verifier.address]))
    MALFORMED._next_line_at = 0.0  # an earlier test's line may be that of this second
    async with grpc.aio.insecure_channel(front.address) as channel:
        call = channel.unary_unary("/outrider.v1.Generation/Cancel")
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(JUNK)
    assert 0 < len([text for text in texts(caplog.records) if "malformed" in text]) <= 5
