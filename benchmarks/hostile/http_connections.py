"""Classes of hostile connections to the HTTP front: slow, half open, pipelined, split, without a key."""

import asyncio
import json
from collections.abc import Sequence

from benchmarks.hostile.attacked_services import Ports
from benchmarks.hostile.http_bodies import COMPLETIONS
from benchmarks.hostile.inputs import CLOSED, HELD, HostileClass, Input, head, http, status_of

HELD_S = 4.0
"""Seconds for which a connection is only held."""
SMALL = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def heads() -> Sequence[Input]:
    """Long, many and odd headers."""
    several = [f"x-{number}: {'v' * 50}" for number in range(1_000)]
    return [
        http(lambda key: head("GET", "/v1/models", key, [f"x-long: {'v' * 60_000}"])),
        http(lambda key: head("GET", "/v1/models", key, [f"x-long: {'v' * 10_000_000}"])),
        http(lambda key: head("GET", "/v1/models", key, several)),
        http(lambda key: head("GET", f"/v1/models/{'m' * 60_000}", key)),
        http(lambda key: head("GET", f"/v1/models?{'a=b&' * 15_000}", key)),
        http(lambda key: head("BREW", "/v1/models", key)),
        http(lambda key: head("GET", "/v1/models", "k" * 60_000)),
        http(lambda key: head("POST", COMPLETIONS, key, ["content-length: -1"])),
        http(lambda key: head("POST", COMPLETIONS, key, ["content-length: 99999999999999999999"])),
        http(
            lambda key: head("POST", COMPLETIONS, key, ["content-length: 4", "content-length: 5"]) + b"null"
        ),
        http(lambda key: b"\r\n" * 100_000 + head("GET", "/v1/models", key)),
        http(lambda key: b"\x00\xff" * 50_000),
        http(lambda key: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 50_000),
    ]


def chunks() -> Sequence[Input]:
    """Bodies in chunks of one byte, with extensions, and with wrong lengths."""
    chunked = ["transfer-encoding: chunked"]

    def body(data: bytes, size: int, extension: bytes = b"") -> bytes:
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"

    padded = SMALL + b" " * 200_000
    return [
        http(lambda key: head("POST", COMPLETIONS, key, chunked) + body(padded, 1)),
        http(
            lambda key: head("POST", COMPLETIONS, key, chunked) + body(padded[:5_000], 1, b";a=" + b"x" * 500)
        ),
        http(lambda key: head("POST", COMPLETIONS, key, chunked) + b"fffffffffffffffff\r\n" + padded),
        http(lambda key: head("POST", COMPLETIONS, key, chunked) + b"zz\r\n" + padded),
        http(
            lambda key: head("POST", COMPLETIONS, key, chunked) + body(SMALL, 7)[:-2] + b"t: x\r\n" * 10_000
        ),
    ]


def pipelined() -> Sequence[Input]:
    """Many requests in one piece, and a second request hidden behind two lengths of the first."""
    return [
        http(lambda key: head("GET", "/health", key) * 2_000),
        http(lambda key: head("GET", "/v1/models", key) * 2_000),
        http(lambda key: (head("POST", COMPLETIONS, key, [f"content-length: {len(SMALL)}"]) + SMALL) * 50),
        smuggle("content-length: 4", "transfer-encoding: chunked"),
        smuggle("transfer-encoding: chunked", "content-length: 4"),
        smuggle("transfer-encoding: chunked", "content-length: 0"),
    ]


def smuggle(*lengths: str) -> Input:
    """A request with two lengths and another request behind it; answers to both are a fault."""

    async def send(ports: Ports) -> str:
        reader, writer = await asyncio.open_connection(*ports.host_and_port("http"))
        try:
            first = head("POST", "/tokenize", ports.key, lengths) + b"2\r\n{}\r\n0\r\n\r\n"
            status = await status_of(reader, writer, first + head("GET", "/version", ports.key))
            async with asyncio.timeout(HELD_S):
                rest = await reader.read(-1)
        except TimeoutError:
            return "smuggled"
        except ConnectionError:
            return CLOSED
        finally:
            writer.close()
        return "smuggled" if b"HTTP/1.1 200" in rest else status

    return send


def slow() -> Sequence[Input]:
    """Hundreds of bodies and heads that come one byte at a time."""

    def dripping(start: bytes, drip: bytes) -> Input:
        async def send(ports: Ports) -> str:
            _, writer = await asyncio.open_connection(*ports.host_and_port("http"))
            try:
                writer.write(
                    head("POST", COMPLETIONS, ports.key, [start.decode()]) if start else b"GET / HTTP/1.1\r\n"
                )
                for _ in range(int(HELD_S / 0.1)):
                    writer.write(drip)
                    await writer.drain()
                    await asyncio.sleep(0.1)
            except ConnectionError:
                return CLOSED
            finally:
                writer.close()
            return HELD

        return send

    return [dripping(b"content-length: 30000000", b"x"), dripping(b"", b"a: b\r\n")] * 150


def half_open() -> Sequence[Input]:
    """Connections that say nothing, say half of a head, or leave before their answer."""

    def silent(data: bytes, seconds: float) -> Input:
        async def send(ports: Ports) -> str:
            _, writer = await asyncio.open_connection(*ports.host_and_port("http"))
            try:
                writer.write(data.replace(b"KEY", ports.key.encode()))
                await asyncio.sleep(seconds)
            finally:
                writer.close()
            return HELD

        return send

    length = [f"content-length: {len(SMALL)}"]
    request = head("POST", COMPLETIONS, "KEY", length)
    stream = json.dumps({"prompt": "x", "max_tokens": 64, "stream": True}).encode()
    streamed = head("POST", COMPLETIONS, "KEY", [f"content-length: {len(stream)}"]) + stream
    many = [silent(b"", HELD_S), silent(b"POST / HTTP/1.1\r\nhost:", HELD_S), silent(request + b"{", HELD_S)]
    return [*many * 100, *[silent(streamed, 0.02), silent(request + SMALL, 0.0)] * 50]


def unauthorised() -> Sequence[Input]:
    """Large bodies and many calls with a wrong key."""
    body = json.dumps({"prompt": [-1] * 3_000_000}).encode()
    large = http(lambda _: head("POST", COMPLETIONS, "wrong", [f"content-length: {len(body)}"]) + body)
    small = http(lambda _: head("POST", COMPLETIONS, "wrong", [f"content-length: {len(SMALL)}"]) + SMALL)
    return [*[large] * 8, *[small] * 200]


CLASSES = [
    HostileClass("http heads", heads),
    HostileClass("http chunks", chunks),
    HostileClass("http pipelined", pipelined),
    HostileClass("http slow", slow, at_once=300),
    HostileClass("http half open", half_open, at_once=300),
    HostileClass("http unauthorised", unauthorised),
]
