"""Streams completions from an OpenAI-compatible endpoint over HTTP/1.1 and times their events.

Speaks on plain sockets, so that at 64 streams the client costs little and no library buffers events.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MOST_LINE = 1 << 22
"""Bytes of the longest line that an endpoint may send."""
MOST_SHOWN = 200
"""Characters of an endpoint's words that a failure repeats."""


class EndpointFailed(Exception):
    """An endpoint refused a request, broke off a stream, or could not be reached; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server."""

    name: str
    url: str
    """Base URL, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    key: str = ""
    """Sent as a bearer token; empty: none."""


@dataclass(slots=True)
class StreamedAnswer:
    """One answer with the times of its events, in seconds of the client's clock."""

    began: float
    events: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    """Completion tokens as the endpoint counts them; without a count, the number of events with text."""

    @property
    def first_ms(self) -> float:
        """Milliseconds to the first event with text."""
        return (self.events[0] - self.began) * 1000

    @property
    def token_ms(self) -> float:
        """Milliseconds of a token from the first event to the last; 0 where all tokens came at once."""
        spread = (self.events[-1] - self.events[0]) * 1000
        return spread / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between events that follow each other."""
        return [(after - before) * 1000 for before, after in zip(self.events, self.events[1:], strict=False)]


async def find_model(endpoint: Endpoint, timeout_s: float) -> str:
    """The first model that the endpoint lists. Raises EndpointFailed."""
    async with aclosing(_lines(endpoint, "GET", "/models", None, timeout_s)) as coming:
        lines = [line async for line in coming]
    try:
        return str(json.loads(b"".join(lines))["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointFailed(f"GET /models gave no model: {shown(b''.join(lines))}") from error


def shown(said: bytes) -> str:
    """The first MOST_SHOWN characters of what an endpoint said, on one line that a terminal can show."""
    text = " ".join(said.decode(errors="replace").split())[:MOST_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "nothing"


def _refusal(endpoint: Endpoint, status: bytes, said: bytes) -> str:
    """Why a request failed whose status is not 200."""
    hint = ""
    if b" 404 " in status and not urlsplit(endpoint.url).path.endswith("/v1"):
        hint = f"; the base URL usually ends in /v1: try {endpoint.url}/v1"
    return f"{shown(status)}: {shown(said)}{hint}"


async def stream_answer(
    endpoint: Endpoint, path: str, body: Mapping[str, Any], timeout_s: float
) -> StreamedAnswer:
    """The answer to one streamed request.

    Args:
        path: `/completions` or `/chat/completions`.
        timeout_s: seconds for the whole answer.

    Raises:
        EndpointFailed: the endpoint refused, broke off before its end, or was too slow.
    """
    answer = StreamedAnswer(time.perf_counter())
    ended = False
    async with aclosing(_lines(endpoint, "POST", path, json.dumps(body).encode(), timeout_s)) as lines:
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                ended = True
            else:
                _add(answer, data)
    if not ended:
        raise EndpointFailed(f"the stream broke off after {len(answer.events)} events")
    if not answer.events:
        raise EndpointFailed("the answer has no text")
    return answer


def _add(answer: StreamedAnswer, data: bytes) -> None:
    now = time.perf_counter()
    try:
        event = json.loads(data)
        choices, usage = event.get("choices") or [], event.get("usage")
        if "error" in event:
            raise EndpointFailed(f"an error came in the stream: {shown(data)}")
        text = "".join(_text(choice) for choice in choices)
        count = int(usage["completion_tokens"]) if usage else 0
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EndpointFailed(f"an event is no completion: {shown(data)}") from error
    if text:
        answer.events.append(now)
        answer.text += text
        answer.tokens = max(answer.tokens, len(answer.events))
    if count:
        answer.tokens = count


def _text(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


async def _lines(
    endpoint: Endpoint, method: str, path: str, body: bytes | None, timeout_s: float
) -> AsyncGenerator[bytes]:
    """Lines of an answer's body, as they come."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(endpoint)
            try:
                writer.write(_head(endpoint, method, path, body) + (body or b""))
                await writer.drain()
                status = await _line(reader)
                chunked = await _read_headers(reader)
                if b" 200 " not in status:
                    raise EndpointFailed(_refusal(endpoint, status, await _rest(reader, chunked)))
                async for line in _body_lines(reader, chunked):
                    yield line
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise EndpointFailed(f"no whole answer within {timeout_s:g} s") from error
    except (EOFError, ConnectionResetError, BrokenPipeError) as error:
        raise EndpointFailed("closed the connection amid an answer") from error
    except (OSError, ValueError) as error:
        raise EndpointFailed(f"{type(error).__name__}: {error}") from error


async def _connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(endpoint.url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    return await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=MOST_LINE)


def _head(endpoint: Endpoint, method: str, path: str, body: bytes | None) -> bytes:
    parts = urlsplit(endpoint.url)
    lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"host: {parts.netloc}"]
    lines += ["connection: close", "accept: text/event-stream, application/json"]
    if endpoint.key:
        lines.append(f"authorization: Bearer {endpoint.key}")
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join((*lines, "", "")).encode()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line, with its end. Raises EOFError where the connection ends before the line does."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


async def _read_headers(reader: asyncio.StreamReader) -> bool:
    """Reads the headers; whether the body comes in chunks."""
    chunked = False
    while (line := await _line(reader)).strip():
        chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
    return chunked


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := await _chunk_size(reader):
        yield (await reader.readexactly(size + 2))[:-2]


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    """Bytes of the next chunk. Raises EOFError where the connection ends before it, EndpointFailed."""
    line = await _line(reader)
    try:
        return int(line, 16)
    except ValueError as error:
        raise EndpointFailed(
            f"the size of a chunk is {shown(line)}, which is no hexadecimal number"
        ) from error


async def _body_lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in _pieces(reader, chunked):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _rest(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    return b"".join([piece async for piece in _pieces(reader, chunked)])
