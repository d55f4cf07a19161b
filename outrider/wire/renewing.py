"""A channel that shows a new certificate once the files hold one.

gRPC fixes a channel's certificate when the channel is made, and shows it to the end, even expired. So new
calls go to the newest of several channels. Calls on an older channel continue there, and their end closes it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from outrider.wire.tls import Certificates, Pem
from outrider.wire.wrapped_channel import WrappedChannel

log = logging.getLogger(__name__)


class RenewingChannel(WrappedChannel):
    """A channel whose new calls show the newest certificate; `make` opens a channel with a certificate."""

    def __init__(self, certificates: Certificates, make: Callable[[Pem], grpc.aio.Channel]) -> None:
        self._certificates = certificates
        self._make = make
        self._shown = certificates.current()
        self._newest = _Generation(make(self._shown))
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self, grace: float | None = None) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._newest.channel.close(grace)

    def _calls(self, kind: str, method: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            generation = self._current()
            made = generation.calls.get(method)
            if made is None:
                made = getattr(generation.channel, kind)(method, *args, **kwargs)
                generation.calls[method] = made
            return generation.began(made(*call_args, **call_kwargs))

        return call

    def _inner(self) -> grpc.aio.Channel:
        return self._current().channel

    def _current(self) -> "_Generation":
        pem = self._certificates.current()
        if pem is not self._shown:
            older, self._shown = self._newest, pem
            self._newest = _Generation(self._make(pem))
            task = asyncio.get_running_loop().create_task(older.retire())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            log.info("a new certificate is shown from now on")
        return self._newest


class _Generation:
    """One channel and the number of calls that run on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls: dict[str, Callable[..., Any]] = {}
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def began(self, call: Any) -> Any:
        self._running += 1
        self._idle.clear()
        call.add_done_callback(self._ended)
        return call

    async def retire(self) -> None:
        """Closes the channel once no call runs on it, or at once when this task is cancelled."""
        try:
            await self._idle.wait()
        finally:
            await self.channel.close()

    def _ended(self, call: object) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
