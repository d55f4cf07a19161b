"""What clients over HTTP do wrong, or to do harm: others are answered, and nothing is left of it."""

import asyncio
import contextlib
import gc
import json
import logging
import re
import time
from typing import Any

import pytest

from orchestrator.front.http.completion_service import CompletionJob
from orchestrator.front.http.connections.protocol import BoundedProtocol
from outrider.tokens import TokenTable
from outrider.wire.incoming.malformed import MALFORMED
from tests.in_time import in_time
from tests.orchestrator.conftest import World
from tests.orchestrator.front.sending import TEXT, send
from tests.orchestrator.front.test_http_completions import HI, asking
from tests.orchestrator.fronts import connected
from tests.traces import traces

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps(TEXT).encode()
CONNECTIONS = 1500


async def raw(url: str, data: bytes) -> bytes:
    """All that a front answers to these bytes, until it closes."""
    async with connected(url) as (reader, writer), asyncio.timeout(60):
        writer.write(data)
        return await reader.read()


def said(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400"), answer
    parsed: dict[str, Any] = json.loads(body)
    return parsed


async def sent_until_the_end(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Sends this again and again, until the connection is ended from the other side."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.01)


NOT_HTTP = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a line end in a name": b"GET /health HTTP/1.1\r\nhost: x\r\nx\n-a: b\r\n\r\n",
    "a bare line end in a value": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\rset-cookie: b\r\n\r\n",
    "a zero byte in a value": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n{}",
    "headers without an end": b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000,
    "many headers that end": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    "an unknown coding": HEAD + b"transfer-encoding: gzip\r\n\r\n{}",
    "no size of a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "two lengths, and no chunks": HEAD
    + b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(BODY)
    + BODY
    + b"\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
}


async def test_what_is_no_http_is_refused_in_the_shape(
    world: World, table: TokenTable, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(world, table) as (_, verifier, front):
        for what, data in NOT_HTTP.items():
            error = said(await raw(front.http, data))["error"]
            assert set(error) == {"message", "type", "param", "code"}, what
            assert error["type"] == "invalid_request_error", what
            assert re.fullmatch(r"the bytes cannot be read as HTTP/1\.1: .+", error["message"]), what
        status, *_ = await asyncio.to_thread(send, front.http, "/health", b"", "GET")
    assert status == 200
    assert not verifier.opened
    assert not traces(caplog)


async def test_bytes_that_are_no_http_are_counted_and_are_one_line_of_the_log(
    world: World, table: TokenTable, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MALFORMED, "_clock", lambda: 1e9)  # within one second, however busy the machine is
    monkeypatch.setattr(MALFORMED, "_next_line_at", 0.0)
    monkeypatch.setattr(MALFORMED, "_unlogged", 0)
    before = MALFORMED.counts["HTTP/1.1"]
    async with asking(world, table) as (_, _, front):
        for _ in range(20):
            said(await raw(front.http, NOT_HTTP["no HTTP"]))
        upgrade = b"connection: close, upgrade\r\nupgrade: h2c\r\n"
        answer = await raw(front.http, b"GET /health HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), "which is answered, and logged nowhere"
    assert MALFORMED.counts["HTTP/1.1"] == before + 20
    (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.getMessage().startswith("malformed message: the bytes cannot be read as HTTP/1.1: ")


async def test_nothing_of_a_request_gets_into_a_header(world: World, table: TokenTable) -> None:
    nasty = "toy\r\nset-cookie: a=b\r\n\r\n<html>"
    body = json.dumps(TEXT | {"model": nasty}).encode()
    length = f"content-length: {len(body)}\r\nconnection: close\r\nx-request-id: a\tb\r\n\r\n".encode()
    async with asking(world, table) as (_, _, front):
        answers = [
            await raw(front.http, HEAD + length + body),
            await raw(
                front.http,
                b"GET /v1/models/a%0d%0aset-cookie:b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            ),
            await raw(
                front.http, b"GET /%0d%0aset-cookie:b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            ),
        ]
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        assert b"set-cookie" not in head.lower()
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_request_behind_a_whole_one_is_answered_in_turn(world: World, table: TokenTable) -> None:
    request = HEAD + f"content-length: {len(BODY)}\r\n\r\n".encode() + BODY
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with asking(world, table) as (_, verifier, front):
        answer = await raw(front.http, request + request + last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert len(verifier.opened) == 2


@pytest.mark.parametrize("order", [1, -1])
async def test_a_body_with_two_lengths_ends_its_connection(
    world: World, table: TokenTable, order: int
) -> None:
    """A proxy in between may have taken the bytes that follow for another client's request."""
    lengths = [f"content-length: {len(BODY)}\r\n".encode(), b"transfer-encoding: chunked\r\n"][::order]
    chunked = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    second = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    async with asking(world, table) as (_, verifier, front):
        answer = await raw(front.http, HEAD + b"".join(lengths) + b"\r\n" + chunked + second)
    error = said(answer)["error"]
    assert error["message"].startswith("the request has both Content-Length and Transfer-Encoding")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer
    assert not verifier.opened


async def test_a_request_that_goes_on_after_its_answer_ends_its_connection(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "lingering_s", 0.2)
    async with (
        asking(world, table, {"max_message_mb": 1}) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        writer.write(HEAD + f"content-length: {2**30}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            await sent_until_the_end(writer, b" " * 10_000)


async def test_a_request_after_an_answer_that_overtook_another_is_not_cut_off(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "lingering_s", 0.2)
    async with (
        asking(world, table, {"max_message_mb": 1}) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        size = 2**21
        writer.write(HEAD + f"content-length: {size}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.write(b" " * size + HEAD + b"content-length: 3\r\n\r\n{")
            await asyncio.sleep(0.4)
            writer.write(b"}}")
            rest = b""
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                rest = await reader.readuntil(b"HTTP/1.1 400")
    in_time(rest, "it was cut off")


async def test_a_client_that_takes_no_answer_loses_its_connection(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "taking_s", 0.2)
    async with (
        asking(world, table) as (_, _, front),
        connected(front.http, limit=1) as (_, writer),
    ):
        async with asyncio.timeout(60):
            await sent_until_the_end(writer, b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100)


async def test_a_body_in_chunks_that_grows_too_large_is_refused(world: World, table: TokenTable) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with (
        asking(world, table, {"max_message_mb": 1}) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):  # the answer does not wait for the rest
                for _ in range(20):
                    writer.write(chunk)
                    await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")


async def test_thousands_of_idle_connections_keep_nobody_out(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"max_streams": 1}) as (client, _, front):
        host, port = front.http.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS)]
        for _, writer in held[::2]:
            writer.write(HEAD)  # and no more
        answer = await client.completions.create(model="toy", prompt="abc", max_tokens=4)
        assert answer.choices[0].finish_reason == "length"
        for _, writer in held:
            writer.close()


async def test_nothing_is_left_of_clients_that_went_away(world: World, table: TokenTable) -> None:
    async with asking(world, table, per_tick=0) as (client, verifier, _):

        async def come_and_go(count: int) -> None:
            """Half of them amid a stream, half while they wait for the whole answer."""
            opened = len(verifier.opened)
            ask = client.completions.create
            asked = [
                asyncio.create_task(ask(model="toy", prompt="abc", max_tokens=60, stream=number % 2 == 0))
                for number in range(count)
            ]
            await world.until(lambda: len(verifier.opened) == opened + count)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await world.until(lambda: len(verifier.cancelled) == len(verifier.opened))

        await come_and_go(6)
        tasks = len(asyncio.all_tasks())
        for _ in range(5):
            await come_and_go(20)
        await world.until(lambda: len(asyncio.all_tasks()) <= tasks + 2)
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is CompletionJob]


async def test_a_template_without_an_end_keeps_nobody_waiting(world: World, table: TokenTable) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    body = json.dumps({"messages": HI}).encode()
    async with asking(world, table, chat=endless) as (client, _, front):
        chatting = asyncio.create_task(asyncio.to_thread(send, front.http, "/v1/chat/completions", body))
        began = time.monotonic()
        await client.completions.create(model="toy", prompt="abc", max_tokens=4)
        answered = time.monotonic() - began
        status, answer, _ = await chatting
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "did not end" in answer["error"]["message"]
    in_time(answered < 2.0, "the loop went on in a thread")
