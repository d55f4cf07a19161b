"""Keeps an Attach stream to one source open: dials, writes requests, reads responses, dials again.

Lives on the event loop and knows nothing of sessions: a `StreamUser` gives the requests and takes the
responses. A stream that breaks, or does not take a request in time, is dropped and dialled again after a
growing pause.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
import grpc.aio

from outrider.runtime.backoff import Backoff
from outrider.runtime.security import certificates
from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.channel import DEFAULT_MESSAGE_MB, open_channel
from outrider.wire.incoming.message_stream import MessageStream
from outrider.wire.incoming.shape import Bounds
from outrider.wire.incoming.unparsed import Unparsed
from outrider.wire.origin import for_nobody
from outrider.wire.status import peer_text
from outrider.wire.tls import SOURCE, Certificates
from speculative.errors import InvalidRequest
from verifier_service.settings import VerifierSettings

log = logging.getLogger(__name__)

_ATTACH = "outrider.v1.DraftSource/Attach"
_Call = grpc.aio.StreamStreamCall[draft_source_pb2.AttachRequest, bytes]
_RESPONSE_BOUNDS = Bounds(
    most_bytes=2 * 2**20, most_fields=16384, because="drafts of over a thousand sessions need no more"
)


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Times and bounds of the link to one source."""

    dial_s: float = 2.0
    """The longest that a connection may take to come up, in seconds."""
    write_s: float = 2.0
    """The longest that the stream may take to accept one request, in seconds; then it is dropped."""
    redial_first_s: float = 0.1
    """Pause before the first attempt to dial again, in seconds; doubles with each failure."""
    redial_most_s: float = 5.0
    """The longest pause between two attempts to dial, in seconds."""
    mute_first_s: float = 1.0
    """How long a source is left alone when it first sent malformed drafts to several sessions, in seconds."""
    mute_most_s: float = 300.0
    """The longest time for which such a source is left alone, in seconds."""
    strikes: int = 3
    """Sessions that may mute the source for malformed drafts before the whole link is muted."""
    unknown_aliases: int = 64
    """Drafts of one stream for unknown sessions after which the whole link is muted."""
    inbox: int = 512
    """Drafts of this source that may wait for the engine; further drafts are dropped. Large ones count for
    several."""
    flood_pause_s: float = 0.005
    """How long reading pauses when drafts had to be dropped, in seconds."""
    source_wait_ms_max: int = 1000
    """The longest time in ms that a session's round may wait for a source that asks for waiting."""
    max_message_mb: int = DEFAULT_MESSAGE_MB
    """The largest response that is read, in MiB."""
    certificates: Certificates | None = None
    """The certificates to present to the source; None: connections are not encrypted."""


def link_limits_from(settings: VerifierSettings) -> LinkLimits:
    """The limits that the settings ask for. Raises InvalidRequest for an unusable certificate."""
    return LinkLimits(
        source_wait_ms_max=settings.source_wait_ms_max,
        max_message_mb=settings.max_message_mb,
        certificates=certificates(settings),
    )


class StreamUser(Protocol):
    """The owner of an AttachStream: decides what is written, and takes what is read."""

    def stream_opened(self) -> None:
        """A new stream is up, and the source knows of no session yet."""

    def described(self, description: draft_source_pb2.SourceDescription) -> None:
        """Takes what the source says about itself, once for each stream; not all sources say something."""

    def stream_closed(self) -> None:
        """The stream is gone, or could not be opened."""

    def malformed(self) -> None:
        """The source sent an invalid or too large message; the stream is dropped."""

    def next_request(self) -> draft_source_pb2.AttachRequest | None:
        """The next request to write; None while there is nothing to say."""

    async def receive(self, response: draft_source_pb2.AttachResponse) -> None:
        """Takes one response; the next one is read when this returns."""


class _Reset(Exception):
    """The stream has to be dropped; str() says why."""


class _Ended(_Reset):
    """The source ended the stream, as it does when it stops."""


class AttachStream:
    """The task that holds the stream to a source, for as long as the stream is wanted."""

    def __init__(self, address: str, user: StreamUser, limits: LinkLimits) -> None:
        self.attached = False
        """Whether the stream is up."""
        self._address = address
        self._user = user
        self._limits = limits
        self._redial = Backoff(limits.redial_first_s, limits.redial_most_s, jitter=0.5)
        self._muted_until = 0.0
        self._wake = asyncio.Event()
        self._wanted = asyncio.Event()
        self._give_up = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name=f"source {address}")

    def want(self) -> None:
        """Keeps the stream open from now on."""
        self._wanted.set()

    def unwant(self) -> None:
        """Lets a stream that breaks stay closed."""
        self._wanted.clear()

    def wake(self) -> None:
        """Has the stream's user asked for its next request."""
        self._wake.set()

    def mute(self, pause_s: float) -> None:
        """Drops the stream, and does not dial again for `pause_s` seconds."""
        self._muted_until = time.monotonic() + pause_s
        self._give_up.set()

    async def close(self) -> None:
        """Drops the stream for good."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        for_nobody()
        while True:
            await self._wanted.wait()
            while (muted_s := self._muted_until - time.monotonic()) > 0:  # noqa: ASYNC110  # or muted again
                await asyncio.sleep(muted_s)
            try:
                await self._attach()
            except (grpc.aio.AioRpcError, TimeoutError, InvalidRequest, _Reset) as error:
                if isinstance(error, InvalidRequest):
                    self._user.malformed()
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                fields = {"peer": self._address}
                level = logging.INFO if isinstance(error, _Ended) else logging.WARNING
                log.log(level, "source lost: %s", peer_text(why or "timed out"), extra={"fields": fields})
            except Exception:
                log.exception("source link failed", extra={"fields": {"peer": self._address}})
            finally:
                self.attached = False
                self._user.stream_closed()
            await asyncio.sleep(self._redial.next_s())

    async def _attach(self) -> None:
        """Holds one stream until it breaks; raises the error that broke it."""
        self._give_up.clear()
        limits = self._limits
        async with open_channel(
            self._address, limits.max_message_mb, certificates=limits.certificates, role=SOURCE
        ) as channel:
            async with asyncio.timeout(limits.dial_s):
                await channel.channel_ready()
            stub = draft_source_pb2_grpc.DraftSourceStub(channel)
            call = self._call(channel)
            self._user.stream_opened()
            self.attached = True
            parts = (self._write(call), self._read(call), self._give_up.wait())
            # Nothing waits for the description: sessions are followed meanwhile.
            tasks = [asyncio.create_task(part) for part in (*parts, self._describe(stub))]
            try:
                done, _ = await asyncio.wait(tasks[:-1], return_when=asyncio.FIRST_COMPLETED)
                cancelled = {task for task in done if task.cancelled()}
                for task in done - cancelled:
                    task.result()
                if cancelled:  # by gRPC, with the call; that must not end this task
                    raise _Reset("its call was cancelled")
            finally:
                for task in tasks:
                    task.cancel()
                call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, channel: grpc.aio.Channel) -> _Call:
        """The call of Attach, whose responses stay bytes: `_read` bounds what it takes to parse them."""
        write = draft_source_pb2.AttachRequest.SerializeToString
        return cast(_Call, channel.stream_stream(f"/{_ATTACH}", request_serializer=write)())

    async def _describe(self, stub: "draft_source_pb2_grpc.DraftSourceAsyncStub") -> None:
        try:
            request = draft_source_pb2.SourceDescribeRequest()
            description = await stub.Describe(request, timeout=self._limits.dial_s)
        except grpc.aio.AioRpcError as error:
            fields = {"peer": self._address}
            log.info("source not described: %s", peer_text(error.details() or ""), extra={"fields": fields})
        else:
            self._user.described(description)

    async def _write(self, call: _Call) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (request := self._user.next_request()) is not None:
                try:
                    async with asyncio.timeout(self._limits.write_s):
                        await call.write(request)
                except asyncio.InvalidStateError as error:  # the stream ended before this write, and says why
                    raise _Reset(await call.details() or "the stream ended") from error

    async def _read(self, call: _Call) -> None:
        def unparsed(data: bytes) -> Unparsed[draft_source_pb2.AttachResponse]:
            return Unparsed(data, draft_source_pb2.AttachResponse, _ATTACH)

        async def read(message: Unparsed[draft_source_pb2.AttachResponse]) -> draft_source_pb2.AttachResponse:
            self._redial.reset()
            return await message.parse(_RESPONSE_BOUNDS)

        messages = (unparsed(data) async for data in call)
        async for response in MessageStream(messages, lambda: self._address, read):
            await self._user.receive(response)
        raise _Ended("the source closed the stream")
