"""What the event loop knows of each session: a mirror of its committed ids, its epoch, and who reads it.

Pure: fed by the engine's batches and asked by the servicer; knows nothing of gRPC or threads.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from outrider.wire.codec import SessionKey, epoch_to_text
from outrider.wire.epochs import checked_epoch
from speculative.errors import StaleEpoch
from speculative.logprobs import TokenLogprob
from verifier_service.commands import Finish, Update
from verifier_service.request import Request, SourceAddress

_EPOCHS_REMEMBERED = 65_536


class Subscriber(Protocol):
    """A cursor of a reader."""

    def touched(self) -> None:
        """The session has something new."""

    def superseded(self) -> None:
        """The session was taken over under a higher epoch."""


@dataclass(slots=True, eq=False)
class Mirror:
    """One session as readers see it."""

    handle: int
    request: Request
    source_names: tuple[str, ...]
    """What credits mean: k is source_names[k - 1]."""
    sources: dict[int, SourceAddress]
    """Sources in use by credit index."""
    unread_since: float | None
    """Since when nobody reads it, on the caller's clock; None while somebody does."""
    ids: list[int] = field(init=False)
    credits: bytearray = field(init=False)
    """One byte per id; 0 for those that came with Open."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per id since Open, where it asked for them."""
    finish: Finish | None = None
    finished_at: float = 0.0
    subscribers: set[Subscriber] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)
        self.credits = bytearray(len(self.ids))

    @property
    def key(self) -> SessionKey:
        """Whose it is."""
        return self.request.key

    @property
    def epoch(self) -> int:
        """Which incarnation it is."""
        return self.request.epoch

    def logprobs_between(self, start: int, end: int) -> list[TokenLogprob]:
        """Of the ids at these positions, less those that came with Open."""
        opened = len(self.request.ids)
        return self.logprobs[max(0, start - opened) : max(0, end - opened)]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Somebody reads from now on."""
        self.subscribers.add(subscriber)
        self.unread_since = None

    def unsubscribe(self, subscriber: Subscriber, now: float) -> None:
        """One reader fewer."""
        self.subscribers.discard(subscriber)
        if not self.subscribers:
            self.unread_since = now


class Registry:
    """All sessions of this worker by key and by handle."""

    def __init__(self) -> None:
        self._by_key: dict[SessionKey, Mirror] = {}
        self._by_handle: dict[int, Mirror] = {}
        self._epochs: OrderedDict[SessionKey, int] = OrderedDict()
        self._handles = 0
        self.running = 0
        """Sessions that have not finished."""

    def __iter__(self) -> Iterator[Mirror]:
        return iter(list(self._by_handle.values()))

    def find(self, key: SessionKey) -> Mirror | None:
        """The session of this key, if it is known here."""
        return self._by_key.get(key)

    def by_handle(self, handle: int) -> Mirror | None:
        """The session of this handle; None for one that was taken over or forgotten."""
        return self._by_handle.get(handle)

    def fence(self, key: SessionKey, epoch: int, now_ms: int) -> None:
        """Remembers the epoch; `now_ms` is the wall clock.

        Raises StaleEpoch where a higher one has been seen for this key, InvalidRequest for one from the
        future, which is not remembered.
        """
        checked_epoch(epoch, now_ms)
        highest = self._epochs.get(key, 0)
        if epoch < highest:
            raise StaleEpoch(
                f"session {key}: epoch {epoch_to_text(epoch)} is older than {epoch_to_text(highest)}", highest
            )
        self._epochs[key] = epoch
        self._epochs.move_to_end(key)
        if len(self._epochs) > _EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    def new_handle(self) -> int:
        """A number that no session here has had."""
        self._handles += 1
        return self._handles

    def add(self, mirror: Mirror) -> None:
        """A new running session. One of an older epoch has to be superseded first."""
        assert mirror.key not in self._by_key, f"session {mirror.key} is here already"
        self._by_key[mirror.key] = self._by_handle[mirror.handle] = mirror
        self.running += 1

    def supersede(self, mirror: Mirror) -> None:
        """Forgets a session that a higher epoch takes over, and tells its readers."""
        self.forget(mirror)
        for subscriber in mirror.subscribers:
            subscriber.superseded()

    def absorb(self, update: Update, now: float) -> Mirror | None:
        """Takes over what a step committed; None where the session is no longer known here."""
        mirror = self._by_handle.get(update.handle)
        if mirror is None or mirror.finish is not None:
            return None
        assert update.position == len(mirror.ids) or not update.ids, (
            f"{update} does not continue {mirror.key}"
        )
        mirror.ids.extend(update.ids)
        mirror.credits.extend(update.credits)
        mirror.logprobs.extend(update.logprobs)
        if update.finish is not None:
            self.finished(mirror, update.finish, now)
        for subscriber in mirror.subscribers:
            subscriber.touched()
        return mirror

    def finished(self, mirror: Mirror, finish: Finish, now: float) -> None:
        """The session ended; its last message can still be read for a while."""
        mirror.finish = finish
        mirror.finished_at = now
        self.running -= 1

    def orphans(self, now: float, grace_s: float) -> list[Mirror]:
        """Running sessions that nobody has read for so long."""
        running = (mirror for mirror in self if mirror.finish is None)
        return [m for m in running if m.unread_since is not None and now - m.unread_since > grace_s]

    def forget_finished(self, now: float, grace_s: float) -> None:
        """Forgets sessions that finished so long ago, but not their epochs."""
        for mirror in self:
            if mirror.finish is not None and now - mirror.finished_at > grace_s:
                self.forget(mirror)

    def forget(self, mirror: Mirror) -> None:
        """Drops a session, finished or not."""
        if self._by_handle.pop(mirror.handle, None) is None:
            return
        del self._by_key[mirror.key]
        if mirror.finish is None:
            self.running -= 1
