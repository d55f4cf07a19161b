"""Requests that a server keeps as bytes until it has decided that they are worth parsing.

gRPC would parse a message before the method that is called has seen the caller's key, and would answer bytes
that are no message with an error of its own. A servicer that is registered with `unparsed` gets `Unparsed`
messages instead. `guarded` parses those of small methods; other methods call `parsed` once they know how
large the message may be.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from outrider.wire.incoming.malformed import MALFORMED
from outrider.wire.incoming.shape import SMALL_BYTES, Bounds, NotWireFormat, check_size, walk
from speculative.errors import InvalidRequest

M = TypeVar("M", bound=Message)

SMALL = Bounds()
"""Bounds of the methods whose largest legal message is small."""


class Pauses:
    """Pauses in the work on one large message, as long as the work that came before.

    So all large messages that are read at once take half of the event loop's time, each an equal part.
    """

    at_once = 0
    """Messages of this process that are being read in pieces."""

    def __enter__(self) -> Self:
        Pauses.at_once += 1
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        Pauses.at_once -= 1

    async def pause(self) -> None:
        """Lets the other tasks of the loop run."""
        worked_s = time.perf_counter() - self._began_s
        await asyncio.sleep(worked_s * (2 * Pauses.at_once - 1))
        self._began_s = time.perf_counter()


class Unparsed(Generic[M]):
    """The bytes of one request, and the message type that they are to be."""

    __slots__ = ("data", "kind", "method", "peer")

    def __init__(self, data: bytes, kind: type[M], method: str) -> None:
        self.data = data
        self.kind = kind
        self.method = method
        self.peer = ""
        """The caller's address, for the log."""

    async def parse(self, bounds: Bounds = SMALL) -> M:
        """The message. Raises InvalidRequest where it exceeds the bounds, or is none.

        Call it once: it lets the bytes go. It never holds the event loop for long: the fields of a message
        above 64 KiB are counted first, and a message with too many of them is not parsed. Both happen with
        pauses.
        """
        # A refused call is garbage that only the collector finds, and this object is a part of it.
        data, self.data = self.data, b""
        check_size(data, bounds)
        try:
            if len(data) <= SMALL_BYTES:
                return self.kind.FromString(data)
            return await self._in_pieces(data, bounds)
        except (DecodeError, NotWireFormat) as error:
            what = f"{len(data)} bytes that are no {self.kind.DESCRIPTOR.full_name}"
            MALFORMED.note(self.method, self.peer, what)
            raise InvalidRequest(
                f"the message cannot be read: {what}; send what {self.method} takes, as protobuf writes it"
            ) from error

    async def _in_pieces(self, data: bytes, bounds: Bounds) -> M:
        cuts: list[int] = []
        with Pauses() as pauses:
            for _ in walk(data, cast(Descriptor, self.kind.DESCRIPTOR), bounds, cuts):
                await pauses.pause()
            message = self.kind()
            for start, end in pairwise((0, *cuts, len(data))):
                await pauses.pause()
                message.MergeFromString(data[start:end])
            await pauses.pause()
        return message


async def parsed(message: Unparsed[M] | M, bounds: Bounds = SMALL) -> M:
    """A request's message, parsed unless a server without `unparsed` did so. Raises InvalidRequest."""
    return await message.parse(bounds) if isinstance(message, Unparsed) else message


def unparsed(server: grpc.aio.Server) -> grpc.aio.Server:
    """The server, to be given to a generated `add_..._to_server`: its methods get `Unparsed` messages."""
    return cast(grpc.aio.Server, _Registering(server))


class _Registering:
    """What generated code needs of a server while it registers a servicer."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignores generic handlers: the methods are registered by name as well."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
    ) -> None:
        """Registers the methods of one service."""
        kept = {name: _keeping_bytes(f"{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, kept),))
        self._server.add_registered_method_handlers(service, kept)


def _keeping_bytes(method: str, handler: Any) -> Any:
    kind = handler.request_deserializer.__self__  # the class whose FromString this is

    def keep(data: bytes) -> Unparsed[Any]:
        return Unparsed(data, kind, method)

    return _asking(handler)._replace(request_deserializer=keep)


class OnlyRequest:
    """The only request of a call, which is not read before the method's checks have let the call in.

    gRPC's server would copy the request before it calls the method. So the method is registered as one that
    takes a stream; for the peer a message and a stream of one message are the same.
    """

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self.messages = messages


def _asking(handler: Any) -> Any:
    """The handler; if its method takes one request, it is given an OnlyRequest."""
    if handler.request_streaming:
        return handler
    if handler.response_streaming:
        answers = handler.unary_stream

        async def stream(messages: AsyncIterable[Any], context: Any) -> AsyncIterator[Any]:
            async with aclosing(answers(OnlyRequest(messages), context)) as responses:
                async for response in responses:
                    yield response

        return handler._replace(request_streaming=True, unary_stream=None, stream_stream=stream)
    answer = handler.unary_unary

    async def call(messages: AsyncIterable[Any], context: Any) -> Any:
        return await answer(OnlyRequest(messages), context)

    return handler._replace(request_streaming=True, unary_unary=None, stream_unary=call)
