"""A channel whose calls fail where a peer answers with bytes that are no message.

gRPC for asyncio logs a trace then, and hands its caller None in place of the message.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.wire.incoming.malformed import MALFORMED
from outrider.wire.wrapped_channel import WrappedChannel


class MalformedAnswer(grpc.aio.AioRpcError):
    """A peer's answer is no message of the type that the call returns.

    It counts as UNAVAILABLE: such a peer serves nobody, so another peer should be asked.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), f"the answer is {what}"
        )


class CheckedChannel(WrappedChannel):
    """A channel whose calls raise MalformedAnswer; `peer` is the address that it dials, for the log."""

    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _inner(self) -> grpc.aio.Channel:
        return self._channel

    def _calls(self, kind: str, method: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        read = kwargs.pop("response_deserializer", None)
        reader = _Reader(read, method.removeprefix("/"), self._peer)
        made = getattr(self._channel, kind)(
            method, *args, response_deserializer=None if read is None else reader.read, **kwargs
        )
        return lambda *call_args, **call_kwargs: _Call(made(*call_args, **call_kwargs))


class _Malformed:
    """Stands for a message that could not be read, until the caller takes it."""

    def __init__(self, what: str) -> None:
        self.what = what


class _Reader:
    """Reads the responses of one method; never raises, since gRPC would swallow the error."""

    def __init__(self, read: Any, method: str, peer: str) -> None:
        self._read = read
        self._method = method
        self._peer = peer

    def read(self, data: bytes) -> Any:
        try:
            return self._read(data)
        except DecodeError:
            name = self._read.__self__.DESCRIPTOR.full_name
            what = f"no {name}: {len(data)} bytes that cannot be read"
            MALFORMED.note(self._method, self._peer, what)
            return _Malformed(what)


class _Call:
    """A call whose responses are messages; all else is the inner call's."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Any:
        return self._response().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return _Messages(aiter(self._call))

    async def read(self) -> Any:
        return _checked(await self._call.read())

    async def _response(self) -> Any:
        return _checked(await self._call)


class _Messages:
    """The responses of a stream."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return _checked(await anext(self._messages))


def _checked(response: Any) -> Any:
    if isinstance(response, _Malformed):
        raise MalformedAnswer(response.what)
    return response
