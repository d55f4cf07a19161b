"""Whatever is sent as a body or a connection is answered or refused: no 422, and nothing that hangs."""

import asyncio
import json
import random
from typing import Any

import pytest

from orchestrator.front.http.bodies import arriving
from orchestrator.front.http.connections.protocol import BoundedProtocol
from outrider.tokens import TokenTable
from tests.orchestrator.conftest import World
from tests.orchestrator.front.sending import CHAT, TEXT, send
from tests.orchestrator.front.test_http_completions import asking
from tests.orchestrator.fronts import connected


async def test_a_body_that_is_no_object_names_no_field(world: World, table: TokenTable) -> None:
    async with asking(world, table) as (_, _, front):
        for body in (b"{", b"[]", b"", b"\xff"):
            status, said, _ = await asyncio.to_thread(send, front.http, "/v1/completions", body)
            assert (status, said["error"]["param"]) == (400, None), body


ODD: list[Any] = [None, True, 0, -1, 1.5, 1e308, 2**63, "", "x", "\u0000", [], [0], ["x"], [[]], [None], {}]
ODD += [{"type": "text"}, {"enabled": False}, {"0": 1}, {"include_usage": True}, {"\u0000": None}]


async def test_whatever_a_body_holds_it_is_answered_or_refused(world: World, table: TokenTable) -> None:
    chosen = random.Random(5)
    async with asking(world, table) as (_, _, front):
        for path, base in (("completions", TEXT), ("chat/completions", CHAT)):
            _, described, _ = await asyncio.to_thread(send, front.http, "/openapi.json", b"", "GET")
            kind = "CompletionRequest" if base is TEXT else "ChatRequest"
            names = sorted(described["components"]["schemas"][kind]["properties"])
            for _ in range(150):
                odd = {name: chosen.choice(ODD) for name in chosen.sample(names, 2) if name != "stream"}
                body = json.dumps(base | odd).encode()
                status, said, _ = await asyncio.to_thread(send, front.http, f"/v1/{path}", body)
                assert status in (200, 400, 404), (odd, said)
                assert status == 200 or said["error"]["param"], (odd, said)


NO_BODIES = [
    (b"{", 400),
    (b"", 400),
    (b"[1]", 400),
    (b'"x"', 400),
    (b"\xff\xfe", 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "a", "temperature": NaN}', 400),
    (b'{"prompt": "a", "user": -Infinity}', 400),
    (b'{"prompt": "a", "speculation": {"criterion": {"bild": {"delta": 2, "delta": 9}}}}', 400),
    (b'{"prompt": "a", "temperature": 0, "temperature": 1}', 400),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": "' + b"x" * 2**20 + b'"}', 413),
    (b"null", 400),
    (b'{"prompt": "a", "m\\u00f6del\\n": 1}', 400),
]


async def test_a_body_that_is_none_is_refused(world: World, table: TokenTable) -> None:
    async with asking(world, table, {"max_message_mb": 1}) as (_, _, front):
        for body, status in NO_BODIES:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                got, said, _ = await asyncio.to_thread(send, front.http, path, body)
                assert (got, set(said["error"])) == (status, {"message", "type", "param", "code"}), said


HALF = "\ud800"
"""Half a character, as JSON can name it."""


async def test_a_name_with_half_a_character_is_refused_by_name(world: World, table: TokenTable) -> None:
    schema = {"properties": {HALF: 5}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    cases = [
        ("/v1/completions", TEXT | {HALF: 1}, r"\ud800"),
        ("/v1/completions", TEXT | {"speculation": {HALF: 1}}, r"speculation.\ud800"),
        ("/v1/chat/completions", CHAT | {HALF: 1}, r"\ud800"),
        ("/v1/chat/completions", CHAT | {"tools": [tool]}, HALF),
        ("/v1/responses", {"input": "a", HALF: 1}, r"\ud800"),
        ("/v1/messages", CHAT | {HALF: 1}, r"\ud800"),
        ("/v1/messages", CHAT | {"tools": [{"name": "f", "input_schema": schema}]}, HALF),
        ("/tokenize", {"prompt": "a", HALF: 1}, r"\ud800"),
    ]
    async with asking(world, table) as (_, _, front):
        for path, body, name in cases:
            status, said, _ = await asyncio.to_thread(send, front.http, path, json.dumps(body).encode())
            assert status == 400, said
            assert name in said["error"]["message"], said
        assert front.sample("body_processes_ended_total") == 0


async def test_headers_that_do_not_end_end_the_connection(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "sending_s", 0.1)
    async with (
        asking(world, table) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        async with asyncio.timeout(60):
            assert await reader.read() == b""


async def test_a_body_that_does_not_end_is_refused(
    world: World, table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving, "SENDING_S", 0.1)
    async with (
        asking(world, table) as (_, _, front),
        connected(front.http) as (reader, writer),
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
