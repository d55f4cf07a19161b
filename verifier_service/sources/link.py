"""One held Attach stream to a source outside this worker, for all the sessions that it drafts for.

Lives on the event loop. Nothing here can hold up the engine: what goes out is gathered in `Outgoing` and
sent one message at a time; what comes in is decoded and put into the engine's inbox, up to a bound. A
stream that breaks or does not take a message in time is dropped and dialled again after a growing pause;
sessions are then followed anew with the ids they have by then. A source that sends something malformed is
muted for that session, and one that does so for several sessions is left alone for growing intervals.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

import grpc
import grpc.aio

from outrider.v1 import draft_source_pb2, draft_source_pb2_grpc
from outrider.wire.channel import open_channel
from outrider.wire.codec import FULL, credit_from_wire, fragment_from_wire
from outrider.wire.origin import for_nobody
from outrider.wire.status import peer_text
from outrider.wire.tls import SOURCE
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment
from verifier_service.engine.messages import InFlight, Offers, Update
from verifier_service.engine.source_policy import SourceActivity
from verifier_service.engine.stats import CountsByName
from verifier_service.sources.backoff import Backoff
from verifier_service.sources.following import Following, LinkLimits
from verifier_service.sources.outgoing import Message, Outgoing

log = logging.getLogger(__name__)

_Call = grpc.aio.StreamStreamCall[draft_source_pb2.AttachRequest, draft_source_pb2.AttachResponse]


class _Reset(Exception):
    """The stream has to be dropped; str() says why."""


class SourceLink:
    """A source's address, the sessions it follows, and the task that keeps the stream."""

    def __init__(
        self, address: str, put: Callable[[Offers], None], counts: CountsByName, limits: LinkLimits
    ) -> None:
        self.address = address
        self.attached = False
        """Whether a stream is up."""
        self.idle_since: float | None = None
        """Since when nothing is followed (monotonic seconds); None while something is."""
        self.least_survival = 0.0
        """That its nodes need now; it is told with whatever it is told next."""
        self._put = put
        self._counts = counts
        self._limits = limits
        self._following: dict[int, Following] = {}
        self._name = ""  # by which what concerns no session in particular is counted
        self._resting: set[int] = set()
        """Sessions of whose last round the source was not to be told."""
        self._parting: dict[int, Following] = {}
        """Sessions that ended before they were followed, which the source may learn from."""
        self._ended: dict[int, tuple[SourceActivity, ...]] = {}
        """Of the sessions that aliases had last."""
        self._struck: set[int] = set()
        self._strikes = 0
        self._muted_until = 0.0
        self._redial = Backoff(limits.redial_first_s, limits.redial_most_s)
        self._mute = Backoff(limits.mute_first_s, limits.mute_most_s)
        self._in_flight = InFlight()
        self._outgoing: Outgoing | None = None
        self._wake = asyncio.Event()
        self._wanted = asyncio.Event()
        self._give_up = asyncio.Event()
        self._task = asyncio.create_task(self._keep(), name=f"source {address}")

    def follow(self, following: Following, resting: bool) -> None:
        """Draft for this session, now or as soon as the stream is up; where it rests, when it is told."""
        handle = following.mirror.handle
        if handle in self._struck:
            return
        self._following[handle] = following
        self._name = following.name
        self.idle_since = None
        self._wanted.set()
        if resting:
            self._resting.add(handle)
        if self._outgoing is not None:
            self._introduce(handle, self._outgoing)

    def progress(self, update: Update, tell: bool) -> None:
        """A session's committed ids grew; without `tell` the source hears of it later."""
        if update.handle not in self._following:
            return
        (self._resting.discard if tell else self._resting.add)(update.handle)
        if self._outgoing is not None and self._outgoing.progress(
            update.handle, update.position, update.ids, update.prefix_hash, tell
        ):
            self._wake.set()

    def finish(self, update: Update) -> None:
        """The session ended with these ids, which a source that learns from it is still told."""
        following = self._following.get(update.handle)
        learns = following is not None and following.mirror.request.learn
        if learns and update.ids:
            self.progress(update, tell=True)
        self.end(update.handle, told=learns)

    def end(self, handle: int, *, told: bool = False) -> None:
        """The session ended, or listens to this source no longer; `told`: once it has heard what there is."""
        self._struck.discard(handle)
        self._unfollow(handle, told=told)

    def strike(self, handle: int, why: str) -> None:
        """The source sent this session something malformed: the session is deaf to it from now on."""
        following = self._following.get(handle)
        if following is None:
            return
        fields = {"source": following.name, "peer": self.address, **following.mirror.key.fields}
        log.warning("muted for this session: %s", why, extra={"fields": fields})
        self._counts[following.name].muted += 1
        self._unfollow(handle)
        self._struck.add(handle)
        self._strikes += 1
        if self._strikes >= self._limits.strikes:
            pause = self._mute.failed(random.random())
            log.warning("source muted for %.1f s", pause, extra={"fields": {"peer": self.address}})
            self._strikes = 0
            self._muted_until = time.monotonic() + pause
            self._give_up.set()

    async def close(self) -> None:
        """Drops the stream for good."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _unfollow(self, handle: int, *, told: bool = False) -> None:
        following = self._following.pop(handle, None)
        self._resting.discard(handle)
        if following is not None and (outgoing := self._outgoing) is not None:
            if told and outgoing.is_untold(handle):
                self._parting[handle] = following
            self._ended[outgoing.alias_of(handle)] = following.records
            if outgoing.end(handle, told=told):
                self._wake.set()
        if not self._following:
            self._wanted.clear()
            self.idle_since = self.idle_since or time.monotonic()

    def _introduce(self, handle: int, outgoing: Outgoing) -> None:
        if handle in self._resting:
            outgoing.follow_later(handle)
        else:
            outgoing.follow(handle)
            self._wake.set()

    async def _keep(self) -> None:
        for_nobody()
        while True:
            await self._wanted.wait()
            await asyncio.sleep(max(0.0, self._muted_until - time.monotonic()))
            try:
                await self._attach()
            except (grpc.aio.AioRpcError, TimeoutError, _Reset) as error:
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                told = peer_text(why or "timed out")
                log.warning("source lost: %s", told, extra={"fields": {"peer": self.address}})
            except Exception:
                log.exception("source link failed", extra={"fields": {"peer": self.address}})
            finally:
                self.attached = False
                self._outgoing = None
            await asyncio.sleep(self._redial.failed(random.random()))

    async def _attach(self) -> None:
        """Holds one stream until it breaks; raises what broke it."""
        self._give_up.clear()
        limits = self._limits
        async with open_channel(
            self.address, limits.max_message_mb, certificates=limits.certificates, role=SOURCE
        ) as channel:
            async with asyncio.timeout(self._limits.dial_s):
                await channel.channel_ready()
            call: _Call = draft_source_pb2_grpc.DraftSourceStub(channel).Attach()
            self._outgoing = Outgoing()
            self._parting.clear()
            self._ended.clear()
            for handle in self._following:
                self._introduce(handle, self._outgoing)
            self.attached = True
            parts = (
                self._write(call, self._outgoing),
                self._read(call, self._outgoing),
                self._give_up.wait(),
            )
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                call.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: _Call, outgoing: Outgoing) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (message := outgoing.take()) is not None:
                try:
                    async with asyncio.timeout(self._limits.write_s):
                        await call.write(self._encode(message, outgoing))
                except asyncio.InvalidStateError as error:  # it ended before this write, and says why
                    raise _Reset(await call.details() or "the stream ended") from error

    def _encode(self, message: Message, outgoing: Outgoing) -> draft_source_pb2.AttachRequest:
        least = int(FULL * self.least_survival)
        request = draft_source_pb2.AttachRequest(end=message.end, least_survival=least)
        for alias in message.follow:
            handle = outgoing.handles[alias]
            parting = self._parting.pop(handle, None)
            known = parting or self._following[handle]
            request.follow.append(known.message(alias, drafts=parting is None))
        for alias, progressed in message.progress.items():
            request.progress.add(
                alias=alias,
                position=progressed.position,
                ids=progressed.ids,
                prefix_hash=progressed.prefix_hash,
            )
        return request

    async def _read(self, call: _Call, outgoing: Outgoing) -> None:
        async for response in call:
            self._redial.succeeded()
            for refusal in response.refusals:
                self._refused(refusal, outgoing)
            room = self._limits.inbox - self._in_flight.count
            drafts = self._decode(response, max(0, room), outgoing)
            if drafts:
                self._in_flight.put += len(drafts)
                self._put(Offers(tuple(drafts), time.perf_counter(), self._in_flight))
            if len(response.drafts) > room:
                self._flooded(response.drafts[max(0, room) :], outgoing)
                await asyncio.sleep(self._limits.flood_pause_s)
        raise _Reset("the source closed the stream")

    def _decode(
        self, response: draft_source_pb2.AttachResponse, most: int, outgoing: Outgoing
    ) -> list[tuple[int, Fragment]]:
        decoded = []
        for place, draft in enumerate(response.drafts[:most]):
            following = self._named(draft.alias, outgoing)
            if following is None:
                self._unnamed(draft, outgoing)
                continue
            try:
                credit = credit_from_wire(response, place, following.credits)
                fragment = fragment_from_wire(draft, credit)
            except MalformedDraft as error:
                self._counts[following.name].malformed += 1
                self.strike(following.mirror.handle, str(error))
            else:
                decoded.append((following.mirror.handle, fragment))
        return decoded

    def _named(self, alias: int, outgoing: Outgoing) -> Following | None:
        handle = outgoing.handles.get(alias)
        return None if handle is None else self._following.get(handle)

    def _unnamed(self, draft: draft_source_pb2.Draft, outgoing: Outgoing) -> None:
        """A draft for no session: late where the alias was ended, else the source made it up."""
        counts = self._counts[self._name]
        if outgoing.was_used(draft.alias):
            counts.offered += len(draft.ids)
            counts.stale += len(draft.ids)
            for record in self._ended.get(draft.alias, ()):
                record.late = True
        else:
            counts.malformed += 1

    def _flooded(self, drafts: list[draft_source_pb2.Draft], outgoing: Outgoing) -> None:
        named = self._named(drafts[0].alias, outgoing)
        self._counts[self._name if named is None else named.name].flooded += len(drafts)

    def _refused(self, refusal: draft_source_pb2.Refusal, outgoing: Outgoing) -> None:
        following = self._named(refusal.alias, outgoing)
        if following is None:
            return
        self._counts[following.name].unfollowed += 1
        fields = {"source": following.name, "peer": self.address, **following.mirror.key.fields}
        log.warning("source does not follow: %s", peer_text(refusal.message), extra={"fields": fields})
        if outgoing.end(following.mirror.handle):
            self._wake.set()
