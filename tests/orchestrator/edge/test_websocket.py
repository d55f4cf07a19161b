"""The contract's messages over a WebSocket: as over gRPC, for whoever may connect."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from orchestrator.front.http.connections.protocol import BoundedProtocol
from orchestrator.front.http.connections.websocket import MOST_WAITING, _Waiting
from outrider.v1 import generation_pb2
from outrider.wire.incoming.unparsed import Unparsed
from tests.edge_device import draft_along, over_websocket, request_of, window
from tests.loop_time import MOST_S, longest_callback
from tests.orchestrator.fronts import connected, write_keys

pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosedError, InvalidStatus

from tests.in_time import in_time
from tests.traces import traces

PROMPT = (5, 6, 7)
EDGE = {"edge_bind": "127.0.0.1:0", "http_bind": "127.0.0.1:0"}


def expected(count: int = 40) -> list[int]:
    return [2 + (position * 7) % 94 for position in range(len(PROMPT), len(PROMPT) + count)]


async def served(world: Any, **settings: Any) -> tuple[Any, Any]:
    verifier = await world.verifier(per_tick=4)
    return verifier, await world.ready(await world.front([verifier.address], **EDGE, **settings))


async def test_a_connection_carries_one_request_after_the_other(world: Any) -> None:
    verifier, front = await served(world)
    async with over_websocket(front.http) as wire:
        for count in (40, 12):
            answer = await draft_along(
                wire, request_of(PROMPT, max_tokens=count), lambda have: [window(have, [1, 2])]
            )
            assert answer.ids == expected(count)
            assert answer.started.source_names == ["lookup", "edge"]
    assert len(verifier.opened) == 2
    assert front.sample("edge_sessions") == 0


async def test_a_request_that_comes_before_the_end_of_the_one_before_is_answered_after_it(world: Any) -> None:
    verifier, front = await served(world)
    verifier.per_tick = 0
    async with over_websocket(front.http) as wire, asyncio.timeout(30):
        await wire.send(request_of(PROMPT, max_tokens=12))
        await world.until(lambda: verifier.opened)
        await wire.send(request_of(PROMPT, max_tokens=20))
        await asyncio.sleep(0.1)  # the first request's device has been heard by then
        verifier.per_tick = 4
        for count in (12, 20):
            ids = [id_ async for response in wire.responses() for id_ in response.tokens.ids]
            assert ids == expected(count)


async def test_a_client_that_goes_away_cancels_its_request(world: Any) -> None:
    verifier, front = await served(world)
    verifier.per_tick = 0
    async with over_websocket(front.http) as wire:
        await wire.send(request_of(PROMPT, max_tokens=40, session="mine"))
        await world.until(lambda: verifier.opened)
        wire.socket.transport.abort()
        await world.until(lambda: verifier.cancelled)
    assert verifier.cancelled[0][0].session == "mine"
    await world.until(lambda: front.sample("edge_sessions") == 0)


async def closed_by(wire: Any) -> tuple[int, str]:
    with pytest.raises(ConnectionClosedError) as closed:
        await wire.socket.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


async def test_an_error_closes_the_connection_with_its_status_and_its_message(world: Any) -> None:
    _, front = await served(world)
    for request, said in (
        (request_of(PROMPT, max_tokens=400), "max_tokens"),
        (request_of(PROMPT, model="none"), "none"),
        (generation_pb2.GenerateRequest(), "the first message must be `start`"),
    ):
        async with over_websocket(front.http) as wire:
            await wire.send(request)
            code, reason = await closed_by(wire)
            assert code in (4003, 4005)
            assert said in reason


async def test_what_is_no_message_closes_the_connection(world: Any) -> None:
    _, front = await served(world)
    async with over_websocket(front.http) as wire:
        await wire.socket.send("text")
        assert (await closed_by(wire))[0] == 1003
    async with over_websocket(front.http) as wire:
        await wire.socket.send(b"\xff\xff\xff")
        assert "cannot be read" in (await closed_by(wire))[1]


async def test_pages_of_other_origins_may_not_connect(world: Any) -> None:
    _, front = await served(world, http_origins=["https://chat.example"])
    with pytest.raises(InvalidStatus) as refused:
        async with over_websocket(front.http, origin="https://evil.example"):
            pass
    assert refused.value.response.status_code == 403
    async with over_websocket(front.http, origin="https://chat.example") as wire:
        assert (await draft_along(wire, request_of(PROMPT, max_tokens=9), lambda have: [])).ids == expected(9)


async def test_a_key_comes_in_a_header_or_where_pages_can_set_none_in_a_subprotocol(
    world: Any, tmp_path: Path
) -> None:
    (key,) = write_keys(tmp_path / "keys", ["us"])
    verifier = await world.verifier(per_tick=4)
    front = await world.front([verifier.address], **EDGE, api_keys_file=tmp_path / "keys")
    await world.until(lambda: front.sample("verifiers_up"))
    ways: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
        ((f"outrider.bearer.{key}",), {}),
        ((), {"authorization": f"Bearer {key}"}),
    )
    for subprotocols, headers in ways:
        async with over_websocket(front.http, *subprotocols, additional_headers=headers) as wire:
            request = request_of(PROMPT, max_tokens=9)
            assert (await draft_along(wire, request, lambda have: [])).ids == expected(9)
    assert {opened.key.tenant for opened in verifier.opened} == {"us"}
    for subprotocols in ((), ("outrider.bearer.or-wrong",)):
        with pytest.raises(InvalidStatus) as refused:
            async with over_websocket(front.http, *subprotocols):
                pass
        assert refused.value.response.status_code == 401


async def test_a_client_that_does_not_speak_the_contract_is_told_so(world: Any) -> None:
    from websockets.asyncio.client import connect

    _, front = await served(world)
    url = front.http.replace("http", "ws") + "/v1/generate"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, proxy=None):
            pass
    assert refused.value.response.status_code == 400
    assert b"outrider.v1" in (refused.value.response.body or b"")


async def test_connections_that_ended_leave_room_for_others(world: Any) -> None:
    _, front = await served(world, max_connections=2)
    for _ in range(4):
        async with over_websocket(front.http) as wire:
            answer = await draft_along(wire, request_of(PROMPT, max_tokens=5), lambda have: [])
            assert answer.ids == expected(5)
        await asyncio.sleep(0.05)


async def test_a_client_that_sends_without_end_holds_no_memory_and_gets_its_answer(world: Any) -> None:
    verifier, front = await served(world)
    verifier.per_tick = 0
    async with over_websocket(front.http) as wire:
        plain = request_of(PROMPT, max_tokens=9)
        plain.start.ClearField("device")
        await wire.send(plain)
        await world.until(lambda: verifier.opened)
        for _ in range(500):
            await wire.send(generation_pb2.GenerateRequest(drafts=window(PROMPT, [1] * 8)))
        verifier.per_tick = 4
        ids = [id_ async for response in wire.responses() for id_ in response.tokens.ids]
    assert ids == expected(9)


def test_large_messages_that_nobody_reads_are_not_kept() -> None:
    waiting = _Waiting()
    for _ in range(MOST_WAITING):
        waiting.add(Unparsed(bytes(2**20), generation_pb2.GenerateRequest, ""))
    assert sum(len(message.data) for message in waiting._messages) == 2**20


HANDSHAKE = (
    b"GET /v1/generate HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-protocol: outrider.v1\r\n\r\n"
)
BROKEN = {
    "a frame that is not masked": b"\x82\x01x",
    "a frame of no known kind": b"\xff\xff\xff\xff",
    "a frame of a terabyte": b"\x82\xff" + (1 << 40).to_bytes(8) + bytes(4),
    "text that is none": b"\x81\x82" + bytes(4) + b"\xff\xff",
    "half a frame": b"\x82",
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_client_that_breaks_the_protocol_is_let_go_and_fills_no_log(
    world: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, front = await served(world)
    async with connected(front.http) as (reader, writer), asyncio.timeout(60):
        writer.write(HANDSHAKE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(BROKEN[what])
        if what == "half a frame":
            writer.write_eof()
        await reader.read()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("change", [(b"sec-websocket-key", b"x-key"), (b"/v1/generate", b"/v1/none")])
async def test_a_handshake_that_is_none_is_refused(world: Any, change: tuple[bytes, bytes]) -> None:
    _, front = await served(world)
    async with connected(front.http) as (reader, writer), asyncio.timeout(60):
        writer.write(HANDSHAKE.replace(*change))
        assert (await reader.read()).startswith(b"HTTP/1.1 4")


async def flood(front: Any, first: bytes, frames: bytes) -> None:
    """Sends frames without end over a WebSocket, and takes nothing. Raises ConnectionError once cut off."""
    async with connected(front.http, limit=1024) as (reader, writer), asyncio.timeout(30):
        writer.write(HANDSHAKE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(first)
        while True:
            writer.write(frames)
            await writer.drain()
            await asyncio.sleep(0)


async def test_a_client_that_pings_and_takes_no_answer_loses_the_connection(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "taking_s", 0.2)
    _, front = await served(world, max_connections=1)
    with pytest.raises(ConnectionError):
        await flood(front, b"", (b"\x89\xfd" + bytes(4) + bytes(125)) * 500)
    async with asyncio.timeout(60), over_websocket(front.http):
        pass  # the connection that was lost no longer counts


async def test_a_message_of_endless_empty_fragments_costs_its_client_the_connection(world: Any) -> None:
    _, front = await served(world)
    with pytest.raises(ConnectionError):
        await flood(front, b"\x02\x80" + bytes(4), (b"\x00\x80" + bytes(4)) * 500)


async def test_a_large_message_in_many_pieces_arrives(world: Any) -> None:
    _, front = await served(world)
    async with over_websocket(front.http, max_queue=1) as wire:
        large = request_of(PROMPT, max_tokens=9)
        large.start.model = "m" * 3_000_000
        await wire.send(large)
        assert "too large" in (await closed_by(wire))[1]


async def test_a_flood_of_pings_leaves_the_loop_to_others_and_is_answered(world: Any) -> None:
    _, front = await served(world)
    pings = 20_000
    async with connected(front.http) as (reader, writer), asyncio.timeout(60):
        writer.write(HANDSHAKE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        with longest_callback() as longest:
            writer.write((b"\x89\x80" + bytes(4)) * pings)
            assert await reader.readexactly(2 * pings) == b"\x8a\x00" * pings
        in_time(longest.processor_s < MOST_S, (longest.ms, longest.what))


async def test_messages_behind_one_another_in_one_piece_are_all_read(world: Any) -> None:
    _, front = await served(world)
    plain = request_of(PROMPT, max_tokens=2)
    plain.start.ClearField("device")
    data = plain.SerializeToString()
    frame = b"\x82" + bytes([0x80 | len(data)]) + bytes(4) + data
    async with connected(front.http) as (reader, writer), asyncio.timeout(60):
        writer.write(HANDSHAKE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(frame * 20)
        got = b""
        while got.count(bytes(expected(2))) < 20:
            more = await reader.read(4096)
            assert more
            got += more


async def test_a_client_that_leaves_behind_a_faulty_request_fills_no_log(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, front = await served(world, max_connections=1)
    for _ in range(20):
        async with connected(front.http) as (reader, writer), asyncio.timeout(60):
            writer.write(HANDSHAKE)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            writer.write(b"\x82\x83" + bytes(4) + b"\xff\xff\xff")
            writer.write_eof()
            await reader.read()
    assert not traces(caplog)
