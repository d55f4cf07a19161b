"""Clients that send hostile inputs by the hundred and check each answer: its status, and an error's shape.

Inputs are taken as connections become free, so that an iterator which makes them as they are asked for keeps
all connections busy.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import grpc
import grpc.aio

from tests.fuzz.fuzzed_server import FuzzedServer

ANSWER_S = 300.0
"""Seconds after which an input without an answer counts as hung, on a machine that has more to do."""
HTTP_STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431})
GRPC_STATUSES = frozenset(
    {
        "OK",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "PERMISSION_DENIED",
        "FAILED_PRECONDITION",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "CANCELLED",
    }
)
ERROR_FIELDS = {"message", "type", "param", "code"}
ANTHROPIC_FIELDS = {"message", "type"}
AT_ONCE = 16
"""Calls at a time over gRPC, and connections over HTTP."""
PIPELINED = 8
"""Bodies that are sent over one connection without waiting for an answer."""


class WrongAnswer(AssertionError):
    """An input got an answer that no input may get."""


@dataclass(slots=True)
class Answers:
    """What came back so far, by front and status."""

    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def inputs(self) -> int:
        """Number of inputs that were answered."""
        return self.statuses.total()


async def side_by_side(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Does the same work `count` times at once; the first error ends all of it."""

    async def one() -> None:
        await work()

    working = [asyncio.create_task(one()) for _ in range(count)]
    try:
        await asyncio.gather(*working)
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


@dataclass(slots=True)
class Connection:
    """A connection to the HTTP front; `fresh` until something was answered over it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    fresh: bool = True


class HttpFuzzClient:
    """Sends bodies over AT_ONCE connections that stay open, PIPELINED bodies at a time over each."""

    def __init__(self, server: FuzzedServer, answers: Answers, tenant: str = "attacker") -> None:
        host, _, port = server.http.rpartition(":")
        self._host, self._port = host, int(port)
        self._key = server.keys[tenant]
        self._answers = answers
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Closes the connections."""
        while self._idle:
            self._idle.pop().writer.close()

    @staticmethod
    def head_of(path: str, size: int, key: str) -> bytes:
        """The head of a request with a body of this size."""
        lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
        lines += ["content-type: application/json", f"content-length: {size}"]
        return "\r\n".join([*lines, "", ""]).encode()

    async def send(self, inputs: Iterable[tuple[str, bytes]]) -> None:
        """Sends all inputs, each a path and a body, and checks their answers. Raises WrongAnswer."""
        left = iter(inputs)

        async def work() -> None:
            while taken := list(islice(left, PIPELINED)):
                while taken:
                    del taken[: await self._over_one_connection(taken)]

        await side_by_side(work, AT_ONCE)

    async def send_raw(self, inputs: Iterable[bytes]) -> None:
        """Sends each input over a connection of its own and checks what comes back, if anything does.

        KEY stands for the key in an input.
        """
        left, key = iter(inputs), self._key.encode()

        async def work() -> None:
            for data in left:
                await self._raw(data.replace(b"KEY", key))

        await side_by_side(work, AT_ONCE)

    async def _raw(self, data: bytes) -> None:
        connection, answered = await self._open(), 0
        try:
            connection.writer.write(data)
            with contextlib.suppress(OSError):  # the front may have answered and closed by now
                connection.writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                while answer := await read_answer(connection.reader):
                    self._check(data, *answer[:2])
                    answered += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except TimeoutError:
            raise WrongAnswer(f"no answer for {ANSWER_S:g} s: {data[:2000]!r}") from None
        finally:
            connection.writer.close()
        self._answers.statuses["http closed"] += not answered

    async def _open(self) -> Connection:
        return Connection(*await asyncio.open_connection(self._host, self._port))

    async def _over_one_connection(self, inputs: Sequence[tuple[str, bytes]]) -> int:
        """How many of the inputs were answered before the connection was closed. Raises WrongAnswer."""
        connection = self._idle.pop() if self._idle else await self._open()
        writer, answered, closes = connection.writer, 0, True

        async def write() -> None:
            for path, body in inputs:
                writer.write(self.head_of(path, len(body), self._key) + body)
                await writer.drain()

        writing = asyncio.create_task(write())
        try:
            for _, body in inputs:
                async with asyncio.timeout(ANSWER_S):
                    answer = await read_answer(connection.reader)
                if answer is None:
                    break
                status, content, closes = answer
                self._check(body, status, content)
                answered += 1
                if closes:
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            closes = True
        except TimeoutError:
            path, body = inputs[answered]
            raise WrongAnswer(f"{path}: no answer for {ANSWER_S:g} s: {body[:500]!r}") from None
        finally:
            if answered < len(inputs):
                closes = True
                writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            if closes:
                writer.close()
        if not answered and connection.fresh:
            path, body = inputs[0]
            raise WrongAnswer(f"{path}: no answer, and the connection was closed: {body[:500]!r}")
        if not closes:
            connection.fresh = False
            self._idle.append(connection)
        return answered

    def _check(self, sent: bytes, status: int, content: bytes) -> None:
        self._answers.statuses[f"http {status}"] += 1
        if status not in HTTP_STATUSES:
            raise WrongAnswer(f"status {status}, {content[:300]!r}, for {sent[:2000]!r}")
        if status == 200:
            return
        said = json.loads(content)
        error = said.get("error", {})
        fields = ANTHROPIC_FIELDS if said.get("type") == "error" else ERROR_FIELDS
        if set(error) != fields or not error["message"] or not isinstance(error["message"], str):
            raise WrongAnswer(
                f"status {status} without an error's shape, {content[:300]!r}, for {sent[:2000]!r}"
            )


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool] | None:
    """Status and content of the next answer, and whether the connection ends with it; None at its end."""
    line = await reader.readline()
    if not line:
        return None
    status, headers = int(line.split(maxsplit=2)[1]), dict[str, str]()
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    closes = headers.get("connection", "").lower() == "close"
    if headers.get("transfer-encoding") != "chunked":
        return status, await reader.readexactly(int(headers.get("content-length", "0"))), closes
    content = b""
    while size := int(await reader.readline(), 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return status, content, closes


class GrpcFuzzClient:
    """Makes calls over one channel, AT_ONCE at a time."""

    def __init__(self, server: FuzzedServer, answers: Answers, tenant: str = "attacker") -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(server.address, options=options)
        self._metadata = (("authorization", f"Bearer {server.keys[tenant]}"),)
        self._answers = answers

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def send(self, inputs: Iterable[tuple[str, bytes]]) -> None:
        """Calls each input's method with its request and checks the status. Raises WrongAnswer."""
        left = iter(inputs)

        async def work() -> None:
            for method, request in left:
                await self._call(method, request)

        await side_by_side(work, AT_ONCE)

    async def _call(self, method: str, request: bytes) -> None:
        called: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        called = self._channel.stream_stream(f"/outrider.v1.{method}")
        try:
            made = called(iter((request,)), metadata=self._metadata, timeout=ANSWER_S)
            async for _ in made:
                pass
            code = await made.code()
            details = await made.details() or ""
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        self._answers.statuses[f"grpc {code.name}"] += 1
        if code.name not in GRPC_STATUSES:
            raise WrongAnswer(f"{method}: {code.name}, {details!r}, for {request[:2000]!r}")
        if code is not grpc.StatusCode.OK and not details:
            raise WrongAnswer(f"{method}: {code.name} without a word, for {request[:2000]!r}")
