"""Generate over a WebSocket, for clients without bidirectional gRPC: phones, and pages in browsers.

Each binary message is one message of the contract: GenerateRequest from the client, GenerateResponse to it.
A connection carries one request after the other. An error closes it: the close code is 4000 and gRPC's number
of the status, the reason is the message.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.types import Receive, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from orchestrator.front.auth import Caller
from orchestrator.front.generating import StreamAnswerer
from orchestrator.front.http.errors import error_response
from outrider.v1 import generation_pb2
from outrider.wire.incoming.message_stream import MessageStream
from outrider.wire.incoming.unparsed import Unparsed
from outrider.wire.keys import HEADER
from outrider.wire.status import status_of
from speculative.errors import InvalidRequest

PATH = "/v1/generate"
SUBPROTOCOL = "outrider.v1"
API_KEY = "x-api-key"
"""The header in which Anthropic's clients send a key."""
BEARER = "outrider.bearer."
"""Prefix of the subprotocol that carries an API key, for web pages, which cannot set headers."""
CLOSED = 1000
NOT_BINARY = 1003
ERRORS = 4000
MOST_REASON = 123
"""The most bytes of a close frame's reason."""
FIRST_MESSAGE_S = 30.0
IDLE_S = 3600.0
"""How long a connection may stay open between two requests, in seconds."""
MOST_WAITING = 64
"""Most messages that wait to be read; further messages are dropped."""
MOST_WAITING_BYTES = 64 * 1024
"""Bytes of the messages that wait beside the first one: drafts are small, and one request may be large."""

DRAFTS_TAG = bytes([generation_pb2.GenerateRequest.DRAFTS_FIELD_NUMBER << 3 | 2])
"""The first byte of a GenerateRequest with `drafts`."""

_Incoming = Unparsed[generation_pb2.GenerateRequest]


def websocket_routes(answerer: StreamAnswerer) -> APIRouter:
    """The routes for WebSockets."""
    router = APIRouter()

    @router.websocket(PATH)
    async def generate(socket: WebSocket) -> None:
        if SUBPROTOCOL not in socket.scope["subprotocols"]:
            error = InvalidRequest(f"the WebSocket's subprotocols lack {SUBPROTOCOL}; offer it")
            await socket.send_denial_response(error_response(error))
            return
        await socket.accept(SUBPROTOCOL)
        await _Connection(socket, answerer).serve()

    return router


def credentials_in(scope: Scope) -> str | None:
    """The authorization of a request or a WebSocket: its header's value, or what a subprotocol carries.

    Anthropic's clients send a key as `x-api-key`; a bearer token beside it takes its place.
    """
    headers = Headers(scope=scope)
    header = headers.get(HEADER)
    if header is not None:
        return header
    if scope["type"] != "websocket":
        key = headers.get(API_KEY)
        return None if key is None else f"Bearer {key}"
    offered: list[str] = scope["subprotocols"]
    key = next((name.removeprefix(BEARER) for name in offered if name.startswith(BEARER)), None)
    return None if key is None else f"Bearer {key}"


class _Connection:
    """One accepted WebSocket."""

    def __init__(self, socket: WebSocket, answerer: StreamAnswerer) -> None:
        self._socket = socket
        self._answerer = answerer
        caller = socket.state.caller
        assert isinstance(caller, Caller)
        self._caller = caller
        self._waiting = _Waiting()

    async def serve(self) -> None:
        """Answers requests until the client disconnects or a request fails."""
        reading = asyncio.create_task(self._read(), name="websocket reader")
        answering = asyncio.create_task(self._answer_all(), name="websocket")
        try:
            await asyncio.wait((reading, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            outcomes = await asyncio.gather(reading, answering, return_exceptions=True)
        if self._socket.client_state is WebSocketState.CONNECTED:
            await self._close(*outcomes)

    async def _close(self, *outcomes: BaseException | int | None) -> None:
        """Closes the connection with the code and reason of an error."""
        error = next((it for it in outcomes if isinstance(it, Exception)), None)
        code = next((it for it in outcomes if isinstance(it, int)), CLOSED)
        reason = ""
        if error is not None:
            status = status_of(error)
            code = ERRORS + int(status.code.value[0])
            reason = status.message.encode()[:MOST_REASON].decode(errors="ignore")
        try:
            await self._socket.close(code, reason)
        except (RuntimeError, OSError, WebSocketDisconnect):  # the client has closed it meanwhile
            return

    async def _answer_all(self) -> None:
        patience_s = FIRST_MESSAGE_S
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    first = await self._next_request()
            except TimeoutError:
                return
            try:
                await self._answerer.answer(first, _Drafts(self._waiting), self._send, self._caller)
            except WebSocketDisconnect:
                return
            patience_s = IDLE_S

    async def _next_request(self) -> "_Incoming | generation_pb2.GenerateRequest":
        """The next request; drafts that came too late for the previous request are dropped."""
        while True:
            message = await self._waiting.first()
            self._waiting.take()
            if not _is_drafts(message.data):
                return message

    async def _send(self, response: generation_pb2.GenerateResponse) -> None:
        await self._socket.send_bytes(response.SerializeToString())

    async def _read(self) -> int | None:
        """Takes messages until the client disconnects; returns a close code if a message was not binary."""

        async def itself(message: Any) -> Any:
            return message

        incoming = _Messages(self._socket.receive)
        async for message in MessageStream(incoming, lambda: self._peer, itself):
            if isinstance(message, int):
                return message
            self._waiting.add(message)
        return None

    @property
    def _peer(self) -> str:
        client = self._socket.client
        return "" if client is None else f"{client.host}:{client.port}"


class _Messages:
    """The binary messages of a WebSocket, and the code to close it with after a message of text."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    def __aiter__(self) -> AsyncIterator[_Incoming | int]:
        return self

    async def __anext__(self) -> _Incoming | int:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise StopAsyncIteration
        if (data := message.get("bytes")) is None:
            return NOT_BINARY
        return Unparsed(data, generation_pb2.GenerateRequest, "Generation/Generate")


class _Waiting:
    """Messages that the connection has received and nobody has read; bounded in number and bytes."""

    def __init__(self) -> None:
        self._messages: deque[_Incoming] = deque()
        self._bytes = 0
        self._some = asyncio.Event()

    def add(self, message: _Incoming) -> None:
        """Keeps a message; drops it where too many wait, or too large ones."""
        full = len(self._messages) >= MOST_WAITING or self._bytes + len(message.data) > MOST_WAITING_BYTES
        if self._messages and full:
            return
        self._messages.append(message)
        self._bytes += len(message.data)
        self._some.set()

    async def first(self) -> _Incoming:
        """Waits for a message and returns it; it stays the first one until `take`."""
        await self._some.wait()
        return self._messages[0]

    def take(self) -> None:
        """Removes the first message."""
        self._bytes -= len(self._messages.popleft().data)
        if not self._messages:
            self._some.clear()


class _Drafts:
    """The drafts of one request; ends before any other message, which is the connection's next request."""

    def __init__(self, waiting: _Waiting) -> None:
        self._waiting = waiting

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Incoming:
        message = await self._waiting.first()
        if not _is_drafts(message.data):
            raise StopAsyncIteration
        self._waiting.take()
        return message


def _is_drafts(data: bytes) -> bool:
    """Whether the bytes are those of a GenerateRequest with `drafts`."""
    return data[:1] == DRAFTS_TAG
