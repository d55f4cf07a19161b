"""A channel that passes its calls on to another channel, and may change them on the way."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import grpc
import grpc.aio


class WrappedChannel(grpc.aio.Channel):
    """A channel whose subclass says which channel takes its calls, and how a call is made."""

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call on the inner channel, as grpc.aio.Channel makes it; so do the methods below."""
        return self._calls("unary_unary", method, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calls("unary_stream", method, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calls("stream_unary", method, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._calls("stream_stream", method, args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    @abstractmethod
    def _inner(self) -> grpc.aio.Channel:
        """The channel that takes a new call."""

    @abstractmethod
    def _calls(self, kind: str, method: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        """The object that makes calls of one method; `kind` names the method of grpc.aio.Channel."""
