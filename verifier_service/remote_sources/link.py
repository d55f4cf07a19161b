"""The link to one source outside this worker: the sessions that subscribe to the source, and its drafts.

Nothing here can hold the engine up. Updates for the source are merged in an `UpdateQueue` and sent one at a
time; drafts are decoded and put into the engine's inbox, up to a bound. Behind a stream that was dialled
again, the source follows its sessions anew, with the tokens that they have by then. A source that sends
something malformed is muted for that session; a source that does so for several sessions is left alone for
growing intervals.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from outrider.runtime.backoff import Backoff
from outrider.v1 import draft_source_pb2
from outrider.wire.codec import FULL, fragment_from_wire, source_index_from_wire
from outrider.wire.observed import off_path_to_wire, tops_to_wire
from outrider.wire.status import peer_text
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment
from speculative.observed import MAX_TOPS
from verifier_service.engine.messages import (
    NODES_OF_A_DRAFT,
    Command,
    InFlight,
    Observe,
    Offers,
    Update,
    WaitFor,
    load_of,
)
from verifier_service.engine.stats import CountsByName
from verifier_service.remote_sources.source_rests import SourceActivity
from verifier_service.remote_sources.stream import AttachStream, LinkLimits
from verifier_service.remote_sources.subscription import Subscription
from verifier_service.remote_sources.update_queue import UpdateQueue

log = logging.getLogger(__name__)

DRAFTS_PER_PAUSE = 64
"""Drafts decoded between two pauses for other tasks of the event loop: 3 ms if the drafts are large."""
_Q_BYTES = 64
"""Bytes of q that count as one more draft."""


class SourceLink:
    """The subscriptions of all sessions to the source at one address. The StreamUser of its stream.

    Args:
        address: of the source, as host:port.
        put: hands drafts and wishes to the engine.
        counts: what sources did, by name; the link adds what it drops.
        limits: times and bounds.
    """

    def __init__(
        self, address: str, put: Callable[[Command], None], counts: CountsByName, limits: LinkLimits
    ) -> None:
        self.address = address
        self.idle_since: float | None = None
        """Since when no session subscribes, in monotonic seconds; None while some session does."""
        self.weights_version = 0
        """Version of the learnt weights that the source drafted with last; 0: those that it was given."""
        self.least_survival = 0.0
        """The survival below which the engine admits no node now; goes out with the next request."""
        self._tops = 0
        """How many of the target's likeliest ids the source wants of each row; 0 until it is described."""
        self._learns = True
        """Whether the source keeps anything of sessions; it may until it is described."""
        self._vocabulary_size = 0
        self._put = put
        self._counts = counts
        self._limits = limits
        self._subscriptions: dict[int, Subscription] = {}
        """By session handle."""
        self._name = ""  # counts under this name what belongs to no session
        self._resting: set[int] = set()
        """Handles of the sessions for which the source rests."""
        self._stopped = False
        """Whether the source was told that no node can be admitted now, since it rests for all sessions."""
        self._struck: set[int] = set()
        """Handles of the sessions that muted the source."""
        self._strikes = 0
        self._unknown = 0
        """Number of the stream's drafts under aliases that the stream never used."""
        self._mute = Backoff(limits.mute_first_s, limits.mute_most_s, jitter=0.5)
        self._in_flight = InFlight()
        self._queue: UpdateQueue | None = None
        """Updates for the stream that is up; None: no stream is up."""
        self._lost = False
        """Whether a stream broke, or could not be opened, since the last one opened."""
        self._activities: WeakValueDictionary[int, SourceActivity] = WeakValueDictionary()
        """What sessions of this link found out, by id(): one object for each temperature band and names."""
        self._parting: dict[int, Subscription] = {}
        """Subscriptions of sessions that ended before this stream followed them, by handle: the source is
        still to learn from those sessions."""
        self._ended: dict[int, SourceActivity] = {}
        """The activity for the session that used an alias of this stream last, by alias."""
        self.stream = AttachStream(address, self, limits)
        """Carries requests to the source, and its responses back."""

    def subscribe(self, subscription: Subscription, resting: bool) -> None:
        """Subscribes a session to the source's drafts.

        The session is sent as soon as the stream is up or, if `resting`, once the source has rested.
        """
        handle = subscription.view.handle
        if handle in self._struck:
            return
        self._subscriptions[handle] = subscription
        self._activities[id(subscription.activity)] = subscription.activity
        self._vocabulary_size = subscription.vocabulary_size
        self._observe(subscription)
        self._name = subscription.name
        self.idle_since = None
        self.stream.want()
        if resting:
            self._resting.add(handle)
        if self._queue is not None:
            self._introduce(handle, self._queue)

    def progress(self, update: Update, *, resting: bool) -> None:
        """Sends the source the tokens that a session committed; holds them back while the source rests."""
        if update.handle not in self._subscriptions:
            return
        (self._resting.add if resting else self._resting.discard)(update.handle)
        if self._is_to_stop:
            self.stream.wake()
        said = update.observed
        if said is not None and not 0 < self._tops <= said.count:
            said = None  # another source of the session wants fewer, and this one's wish came too late
        said = said and said.of_text(self._vocabulary_size)
        if self._queue is not None and self._queue.progress(
            update.handle, update.position, update.ids, update.prefix_hash, hold=resting, said=said
        ):
            self.stream.wake()

    def finish(self, update: Update) -> None:
        """Ends the subscription of a finished session; a source that learns gets its last tokens first."""
        subscription = self._subscriptions.get(update.handle)
        learns = self._learns and subscription is not None and subscription.view.request.learn
        if learns and update.ids:
            self.progress(update, resting=False)
        self.unsubscribe(update.handle, flush=learns)

    def unsubscribe(self, handle: int, *, flush: bool = False) -> None:
        """Ends a session's subscription; with `flush` the source first gets every token that it lacks."""
        self._struck.discard(handle)
        self._remove(handle, flush=flush)

    def strike(self, handle: int, why: str) -> None:
        """Mutes the source for a session to which the source sent something malformed."""
        subscription = self._subscriptions.get(handle)
        if subscription is None:
            return
        fields = {"source": subscription.name, "peer": self.address, **subscription.view.key.fields}
        log.warning("muted for this session: %s", why, extra={"fields": fields})
        self._counts[subscription.name].muted += 1
        self._remove(handle)
        self._struck.add(handle)
        self._strikes += 1
        if self._strikes >= self._limits.strikes:
            self._mute_all()

    def malformed(self) -> None:
        """Mutes a source that sent an unreadable message, for all sessions."""
        self._counts[self._name].malformed += 1
        self._mute_all()

    def stream_opened(self) -> None:
        """Introduces every subscribed session to the source."""
        self._queue = UpdateQueue(self._follow_bytes)
        self._stopped = False
        self.weights_version = self._tops = 0
        self._learns = True
        self._unknown = 0
        self._parting.clear()
        self._ended.clear()
        if self._lost:
            for reference in self._activities.valuerefs():
                if (activity := reference()) is not None:
                    activity.comebacks += 1
            self._lost = False
        for handle in self._subscriptions:
            self._introduce(handle, self._queue)

    def stream_closed(self) -> None:
        """Forgets what the source knows: the next stream starts from nothing."""
        self._queue = None
        self._lost = True

    def next_request(self) -> draft_source_pb2.AttachRequest | None:
        """The next updates for the source; None while there are none."""
        if self._queue is None:
            return None
        if (update := self._queue.take()) is None:
            return self._stop() if self._is_to_stop else None
        least, self._stopped = int(FULL * self.least_survival), False
        request = draft_source_pb2.AttachRequest(end=update.end, least_survival=least)
        for alias in update.follow:
            handle = self._queue.handles[alias]
            parting = self._parting.pop(handle, None)
            subscription = parting or self._subscriptions[handle]
            request.follow.append(subscription.message(alias, drafts=parting is None))
        for alias, unsent in update.progress.items():
            request.progress.add(
                alias=alias,
                position=unsent.position,
                ids=unsent.ids,
                prefix_hash=unsent.prefix_hash,
                tops=tops_to_wire(unsent.tops, self._tops),
                off_path=off_path_to_wire(unsent.off_path, self._tops),
            )
        return request

    def described(self, description: draft_source_pb2.SourceDescription) -> None:
        """Has the engine note what the target says, as far as the source wants to know."""
        self._learns = description.learns or not description.HasField("learns")
        self._tops = min(description.tops, MAX_TOPS, self._vocabulary_size)
        for subscription in self._subscriptions.values():
            self._observe(subscription)

    async def receive(self, response: draft_source_pb2.AttachResponse) -> None:
        """Hands the drafts of one response to the engine. Drops what exceeds the inbox, and pauses then."""
        queue = self._queue
        if queue is None:
            return
        self.weights_version = response.weights_version
        for refusal in response.refusals:
            self._refused(refusal, queue)
        for alias, ms in {wait.alias: wait.ms for wait in response.waits}.items():
            self._asked_to_wait(alias, ms, queue)
        taken = 0
        while taken < len(response.drafts) and (free := self._free):
            most = _until_pause(response.drafts, taken, free)
            self._offer(self._decode(response, taken, taken + most, queue))
            taken += most
            if taken < len(response.drafts):
                await asyncio.sleep(0)
        if taken < len(response.drafts):
            self._flooded(response.drafts[taken].alias, len(response.drafts) - taken, queue)
            await asyncio.sleep(self._limits.flood_pause_s)

    @property
    def _is_to_stop(self) -> bool:
        """Whether the source still computes drafts, although it rests for all sessions that it follows."""
        return not self._stopped and 0 < len(self._resting) == len(self._subscriptions)

    def _stop(self) -> draft_source_pb2.AttachRequest:
        """Asks the source to compute nothing more until it is sent the next tokens."""
        self._stopped = True
        return draft_source_pb2.AttachRequest(least_survival=FULL)

    @property
    def _free(self) -> int:
        """How many drafts the engine's inbox takes now."""
        return max(0, self._limits.inbox - self._in_flight.count)

    def _offer(self, drafts: Sequence[tuple[int, Fragment]]) -> None:
        if drafts:
            self._in_flight.put += load_of(drafts)
            self._put(Offers(tuple(drafts), time.perf_counter(), self._in_flight))

    def _observe(self, subscription: Subscription) -> None:
        if self._tops:
            index = subscription.source_indices[0]
            self._put(Observe(subscription.view.handle, index, self._tops))

    def _mute_all(self) -> None:
        pause = self._mute.next_s()
        log.warning("source muted for %.1f s", pause, extra={"fields": {"peer": self.address}})
        self._strikes = 0
        self.stream.mute(pause)

    def _introduce(self, handle: int, queue: UpdateQueue) -> None:
        if handle in self._resting:
            queue.follow_later(handle)
        else:
            queue.follow(handle)
            self.stream.wake()

    def _remove(self, handle: int, *, flush: bool = False) -> None:
        subscription = self._subscriptions.pop(handle, None)
        self._resting.discard(handle)
        if subscription is not None and (queue := self._queue) is not None:
            if flush and queue.is_unannounced(handle):
                self._parting[handle] = subscription
            self._ended[queue.alias_of(handle)] = subscription.activity
            if queue.end(handle, flush=flush):
                self.stream.wake()
        if not self._subscriptions:
            self.stream.unwant()
            self.idle_since = self.idle_since or time.monotonic()

    def _decode(
        self, response: draft_source_pb2.AttachResponse, start: int, end: int, queue: UpdateQueue
    ) -> list[tuple[int, Fragment]]:
        decoded = []
        for place, draft in enumerate(response.drafts[start:end], start):
            subscription = self._by_alias(draft.alias, queue)
            if subscription is None:
                self._drop_unknown(draft, queue)
                continue
            try:
                source_index = source_index_from_wire(response, place, subscription.source_indices)
                fragment = fragment_from_wire(draft, source_index)
            except MalformedDraft as error:
                self._counts[subscription.name].malformed += 1
                self.strike(subscription.view.handle, str(error))
            else:
                decoded.append((subscription.view.handle, fragment))
        return decoded

    def _follow_bytes(self, handle: int) -> int:
        return (self._parting.get(handle) or self._subscriptions[handle]).follow_bytes

    def _by_alias(self, alias: int, queue: UpdateQueue) -> Subscription | None:
        handle = queue.handles.get(alias)
        return None if handle is None else self._subscriptions.get(handle)

    def _drop_unknown(self, draft: draft_source_pb2.Draft, queue: UpdateQueue) -> None:
        """Counts a draft whose alias names no session: late if the session ended, malformed otherwise."""
        counts = self._counts[self._name]
        if queue.was_used(draft.alias):
            counts.offered += len(draft.ids)
            counts.stale += len(draft.ids)
            if (activity := self._ended.get(draft.alias)) is not None:
                activity.late = True
        else:
            counts.malformed += 1
            self._unknown += 1
            if self._unknown == self._limits.unknown_aliases:
                self._mute_all()

    def _flooded(self, alias: int, drafts: int, queue: UpdateQueue) -> None:
        subscription = self._by_alias(alias, queue)
        self._counts[self._name if subscription is None else subscription.name].flooded += drafts

    def _asked_to_wait(self, alias: int, ms: int, queue: UpdateQueue) -> None:
        if (subscription := self._by_alias(alias, queue)) is not None:
            most = min(ms, self._limits.source_wait_ms_max)
            self._put(WaitFor(subscription.view.handle, subscription.source_indices[0], most))

    def _refused(self, refusal: draft_source_pb2.Refusal, queue: UpdateQueue) -> None:
        subscription = self._by_alias(refusal.alias, queue)
        if subscription is None:
            return
        self._counts[subscription.name].unfollowed += 1
        fields = {"source": subscription.name, "peer": self.address, **subscription.view.key.fields}
        log.warning("source does not follow: %s", peer_text(refusal.message), extra={"fields": fields})
        if queue.end(subscription.view.handle):
            self.stream.wake()


def _until_pause(drafts: Sequence[draft_source_pb2.Draft], start: int, most: int = DRAFTS_PER_PAUSE) -> int:
    """How many drafts from `start` on are decoded before the next pause; at least one.

    They count for no more than `most` small drafts, but for the last of them.
    """
    weight = count = 0
    while weight < min(most, DRAFTS_PER_PAUSE) and start + count < len(drafts):
        draft = drafts[start + count]
        weight += 1 + len(draft.q) // _Q_BYTES + len(draft.ids) // NODES_OF_A_DRAFT
        count += 1
    return count
