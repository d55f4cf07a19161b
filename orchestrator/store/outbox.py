"""What a store has yet to be told of the sessions that are relayed here. Pure.

Holds no message: a session that changed is named once, however often it changed, and what is to be written is
read off its ids when the time comes. So it is bounded by the sessions that run, and after a store has lost
everything it says everything again. What it learns of the store's state are the lengths that appends answer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.store import STALE, Append, SessionRecord
from outrider.wire.codec import SessionKey

MOST_AT_ONCE = 64
"""Sessions of one batch."""
MOST_ENDINGS = 16
"""Of one batch: each takes several commands."""
MOST_IDS = 4096
"""Ids of one append; what is longer takes several."""
MOST_LEFT = 1024
"""Sessions that have ended or were let go, of which the store is still to be told; older ones are dropped."""
NOT_OURS = 2**31
"""A length that no session reaches, for ids that the store has from somebody else."""


@dataclass(slots=True)
class Live:
    """A session whose request runs here, or was let go a moment ago."""

    record: SessionRecord
    lifts: int
    """Its first epoch where it is a client's new request: recorded Cancels below are not meant for it."""
    ids: Mapping[int, Sequence[int]]
    """Generated ids by choice; they grow."""
    kept: bool = False
    """Whether the store has the record, as far as is known."""
    stored: dict[int, int] = field(default_factory=dict)
    """How many ids it has by choice, likewise."""
    renew: bool = False
    left: bool = False

    def appends(self) -> list[Append]:
        """What the store lacks, or its lease needs."""
        found = []
        for choice, ids in self.ids.items():
            start = self.stored.get(choice, 0)
            if len(ids) > start or (self.renew and start):
                key = self.record.key._replace(choice=choice)
                found.append(Append(key, self.record.epoch, start, tuple(ids[start : start + MOST_IDS])))
        return found


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that has ended."""

    record: SessionRecord
    scope: str
    """Its tenant and model: who may use its KV."""
    ids: tuple[int, ...]
    """Prompt and generated ones of choice 0; empty where nothing is worth coming back to."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be written next."""

    puts: list[tuple[SessionRecord, int]]
    appends: list[Append]
    endings: list[Ending]

    def __bool__(self) -> bool:
        return bool(self.puts or self.appends or self.endings)


class Outbox:
    """All methods take constant time, but `take` and `repeat_all`."""

    def __init__(self) -> None:
        self._live: dict[SessionKey, Live] = {}
        self._changed: dict[SessionKey, None] = {}
        self._endings: deque[Ending] = deque()
        self._left: dict[SessionKey, None] = {}
        self.dropped = 0
        """Endings and sessions let go that the store was never told of."""

    def __bool__(self) -> bool:
        return bool(self._changed or self._endings)

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: SessionKey) -> Live | None:
        """The session as it is known here."""
        return self._live.get(key)

    def opened(self, record: SessionRecord, lifts: int, ids: Mapping[int, Sequence[int]]) -> None:
        """It is being opened under a new epoch."""
        self._left.pop(record.key, None)
        self._live[record.key] = Live(record, lifts, ids)
        self._changed[record.key] = None

    def grew(self, key: SessionKey) -> None:
        """It has more ids."""
        self._changed[key] = None

    def cancelled(self, key: SessionKey) -> None:
        """Its client gave it up."""
        if (live := self._live.get(key)) is not None:
            live.record, live.kept = live.record._replace(cancelled=True), False
            self._changed[key] = None

    def ended(self, key: SessionKey, epoch: int, scope: str, prompt: Sequence[int]) -> None:
        """The request of this epoch has; without a prompt nothing is worth coming back to."""
        live = self._live.get(key)
        if live is None or live.record.epoch != epoch:
            return
        self._drop(key)
        ids = (*prompt, *live.ids[0]) if prompt and 0 in live.ids else ()
        self._endings.append(Ending(live.record, scope, ids))
        if len(self._endings) > MOST_LEFT:
            self._endings.popleft()
            self.dropped += 1

    def left(self, key: SessionKey, epoch: int) -> None:
        """It is read here no longer, and what is known of it is its last word from here."""
        live = self._live.get(key)
        if live is None or live.record.epoch != epoch:
            return
        live.left = True
        self._left[key] = self._changed[key] = None
        if len(self._left) > MOST_LEFT:
            self._drop(next(iter(self._left)))
            self.dropped += 1

    def repeat_all(self) -> None:
        """Leases need renewal, or the store may have lost what it had."""
        for key, live in self._live.items():
            live.kept, live.renew = False, True
            self._changed[key] = None

    def take(self) -> Batch:
        """The next batch; to be followed by `wrote` or `put_back`."""
        batch = Batch([], [], [])
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

    def put_back(self, batch: Batch) -> None:
        """It could not be written."""
        for record, _ in batch.puts:
            self._changed[record.key] = None
        for it in batch.appends:
            self._changed[it.key._replace(choice=0)] = None
        self._endings.extendleft(reversed(batch.endings))

    def wrote(self, batch: Batch, kept: Sequence[bool], lengths: Sequence[int]) -> None:
        """The store's answers to a batch's puts and appends."""
        told: dict[SessionKey, Live] = {}
        for (record, _), is_kept in zip(batch.puts, kept, strict=True):
            live = self._live.get(record.key)
            if live is None or live.record.epoch != record.epoch:
                continue
            if not is_kept:
                self._drop(record.key)  # somebody else has it under a later epoch
                continue
            live.kept = live.record == record
            told[record.key] = live
        for it, length in zip(batch.appends, lengths, strict=True):
            live = self._live.get(it.key._replace(choice=0))
            if live is not None and live.record.epoch == it.epoch:
                _appended(live, it, length)
                told[live.record.key] = live
        for key, live in told.items():
            if live.left or not live.kept or live.appends():
                self._changed[key] = None

    def _drop(self, key: SessionKey) -> None:
        self._live.pop(key, None)
        self._changed.pop(key, None)
        self._left.pop(key, None)


def _appended(live: Live, it: Append, length: int) -> None:
    """A record that is shorter than it was lost something: the store's record of the session, too."""
    live.renew = False
    if length == STALE:
        live.stored[it.key.choice] = NOT_OURS
        return
    live.kept = live.kept and length >= it.start
    live.stored[it.key.choice] = min(length, len(live.ids[it.key.choice]))
