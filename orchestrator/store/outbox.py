"""The outbox to the store: which sessions' records have changed since they were written. Pure.

The outbox holds no messages. A session that changed is in it once, however often it changed, and what to
write is read off the session when its turn comes. So the outbox is bounded by the running sessions, and a
store that lost everything is written anew. All that it knows of the store's state are the lengths that
appends return.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.store import STALE, Append, SessionRecord
from outrider.wire.codec import SessionKey

MOST_AT_ONCE = 64
"""The most sessions in one batch."""
MOST_ENDINGS = 16
"""The most ended requests in one batch: each takes several commands."""
MOST_IDS = 4096
"""The most tokens in one append; longer records take several appends."""
MOST_LEFT = 1024
"""The most sessions that ended or were detached and are still to be written; beyond it the oldest are
dropped."""
NOT_OURS = 2**31
"""A length that no session reaches; it stands for tokens that another orchestrator has recorded."""


@dataclass(slots=True)
class LiveSession:
    """A session whose request runs here, or was detached a moment ago."""

    record: SessionRecord
    lifts: int
    """The first epoch of a client's new request, else 0: Cancels recorded under lower epochs do not concern
    it."""
    ids: Mapping[int, Sequence[int]]
    """Generated token ids by choice; they grow."""
    kept: bool = False
    """Whether the store has the record, as far as is known."""
    stored: dict[int, int] = field(default_factory=dict)
    """Number of tokens that the store has of each choice, as far as is known."""
    renew: bool = False
    """Whether the leases of the recorded tokens need renewal."""
    left: bool = False
    """Whether this orchestrator has detached from the session."""

    def appends(self) -> list[Append]:
        """The tokens that the store lacks, and appends without tokens that renew a lease."""
        found = []
        for choice, ids in self.ids.items():
            start = self.stored.get(choice, 0)
            if len(ids) > start or (self.renew and start):
                key = self.record.key._replace(choice=choice)
                found.append(Append(key, self.record.epoch, start, tuple(ids[start : start + MOST_IDS])))
        return found


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended and whose end is still to be written."""

    record: SessionRecord
    scope: str
    """Scope of the request's prefixes; see prefixes.scope_of."""
    ids: tuple[int, ...]
    """Prompt and generated token ids of choice 0; empty where no request will want to reuse them."""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """The records, tokens and ended requests to write next."""

    puts: list[tuple[SessionRecord, int]]
    appends: list[Append]
    endings: list[EndedRequest]

    def __bool__(self) -> bool:
        return bool(self.puts or self.appends or self.endings)


class StoreOutbox:
    """The sessions to write. All methods take constant time, except `take` and `repeat_all`."""

    def __init__(self) -> None:
        self._live: dict[SessionKey, LiveSession] = {}
        self._changed: dict[SessionKey, None] = {}
        self._endings: deque[EndedRequest] = deque()
        self._left: dict[SessionKey, None] = {}
        self.dropped = 0
        """Number of sessions that ended or were detached and were never written."""

    def __bool__(self) -> bool:
        return bool(self._changed or self._endings)

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: SessionKey) -> LiveSession | None:
        """The session, if its request runs here or was detached a moment ago."""
        return self._live.get(key)

    def opened(self, record: SessionRecord, lifts: int, ids: Mapping[int, Sequence[int]]) -> None:
        """Note that the session is being opened under a new epoch."""
        self._left.pop(record.key, None)
        self._live[record.key] = LiveSession(record, lifts, ids)
        self._changed[record.key] = None

    def grew(self, key: SessionKey) -> None:
        """Note that the session has more tokens than its entry."""
        self._changed[key] = None

    def cancelled(self, key: SessionKey) -> None:
        """The session's client cancelled its request."""
        if (live := self._live.get(key)) is not None:
            live.record, live.kept = live.record._replace(cancelled=True), False
            self._changed[key] = None

    def lost(self, key: SessionKey, epoch: int) -> None:
        """Note that no verifier has the session of this epoch any more."""
        live = self._live.get(key)
        if live is not None and live.record.epoch == epoch:
            live.record, live.kept = live.record._replace(verifier=""), False
            self._changed[key] = None

    def ended(self, key: SessionKey, epoch: int, scope: str, prompt: Sequence[int]) -> None:
        """The request of this epoch has ended; an empty prompt says that its tokens will not be reused."""
        live = self._live.get(key)
        if live is None or live.record.epoch != epoch:
            return
        self._drop(key)
        ids = (*prompt, *live.ids[0]) if prompt and 0 in live.ids else ()
        self._endings.append(EndedRequest(live.record, scope, ids))
        if len(self._endings) > MOST_LEFT:
            self._endings.popleft()
            self.dropped += 1

    def left(self, key: SessionKey, epoch: int) -> None:
        """Note that this orchestrator no longer reads the session; its last state is still to be written."""
        live = self._live.get(key)
        if live is None or live.record.epoch != epoch:
            return
        live.left = True
        self._left[key] = self._changed[key] = None
        if len(self._left) > MOST_LEFT:
            self._drop(next(iter(self._left)))
            self.dropped += 1

    def repeat_all(self) -> None:
        """Write every session again: its lease needs renewal, or the store may have lost it."""
        for key, live in self._live.items():
            live.kept, live.renew = False, True
            self._changed[key] = None

    def take(self) -> WriteBatch:
        """The next batch; to be followed by `wrote` or `put_back`."""
        batch = WriteBatch([], [], [])
        while self._changed and len(batch.puts) + len(batch.appends) < MOST_AT_ONCE:
            key = next(iter(self._changed))
            del self._changed[key]
            if (live := self._live.get(key)) is None:
                continue
            if not live.kept:
                batch.puts.append((live.record, live.lifts))
            appends = live.appends()
            batch.appends.extend(appends)
            if live.left and live.kept and not appends:
                self._drop(key)
        while self._endings and len(batch.endings) < MOST_ENDINGS:
            batch.endings.append(self._endings.popleft())
        return batch

    def put_back(self, batch: WriteBatch) -> None:
        """Take back a batch that could not be written."""
        for record, _ in batch.puts:
            self._changed[record.key] = None
        for it in batch.appends:
            self._changed[it.key._replace(choice=0)] = None
        self._endings.extendleft(reversed(batch.endings))

    def wrote(self, batch: WriteBatch, kept: Sequence[bool], lengths: Sequence[int]) -> None:
        """A batch was written; `kept` and `lengths` are the store's answers to its puts and appends."""
        written: dict[SessionKey, LiveSession] = {}
        for (record, _), is_kept in zip(batch.puts, kept, strict=True):
            live = self._live.get(record.key)
            if live is None or live.record.epoch != record.epoch:
                continue
            if not is_kept:
                self._drop(record.key)  # another orchestrator has the session under a later epoch
                continue
            live.kept = live.record == record
            written[record.key] = live
        for it, length in zip(batch.appends, lengths, strict=True):
            live = self._live.get(it.key._replace(choice=0))
            if live is not None and live.record.epoch == it.epoch:
                _appended(live, it, length)
                written[live.record.key] = live
        for key, live in written.items():
            if live.left or not live.kept or live.appends():
                self._changed[key] = None

    def _drop(self, key: SessionKey) -> None:
        self._live.pop(key, None)
        self._changed.pop(key, None)
        self._left.pop(key, None)


def _appended(live: LiveSession, it: Append, length: int) -> None:
    """Take the length that an append returned.

    A length below the append's start says that the store lost tokens, and so probably the session's record
    too.
    """
    live.renew = False
    if length == STALE:
        live.stored[it.key.choice] = NOT_OURS
        return
    live.kept = live.kept and length >= it.start
    live.stored[it.key.choice] = min(length, len(live.ids[it.key.choice]))
