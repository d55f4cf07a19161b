"""What the event loop knows of each session: a mirror of its committed ids, its epoch, and who reads it.

Pure: fed by the engine's batches and asked by the servicer; knows nothing of gRPC or threads.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from outrider.wire.codec import MAX_CHOICES, SessionKey, epoch_to_text
from outrider.wire.epochs import checked_epoch
from speculative.errors import StaleEpoch
from speculative.grammar import Matcher
from speculative.logprobs import TokenLogprob
from speculative.stats import UsageCount
from verifier_service.engine.messages import Finish, Update
from verifier_service.request import Request, SourceAddress

_EPOCHS_REMEMBERED = 65_536
_MOST_KEPT = 16_384
_MOST_KEPT_IDS = 1_000_000
# Log-probabilities of an id take some 300 bytes, the id itself 40.
_LOGPROB_WEIGHT = 8


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
    grammar: Matcher | None = None
    """What its text has to be. The engine's while it runs; while it is parked, after its ids."""
    ids: list[int] = field(init=False)
    credits: bytearray = field(init=False)
    """One byte per id; 0 for those that came with Open."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One per id since Open, where it asked for them."""
    finish: Finish | None = None
    parked: UsageCount | None = None
    """What it has cost, while it is parked."""
    rounds: int = 0
    admitted: int = 0
    """Drafted nodes that its rounds computed."""
    deadline_s: float | None = None
    """When it is to end, on the engine's clock; None: never."""
    traceparent: str = ""
    """Of its span, where that is recorded."""
    subscribers: dict[Subscriber, None] = field(default_factory=dict)
    """In the order in which they came, which is that in which they are told."""

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)
        self.credits = bytearray(len(self.ids))

    @property
    def key(self) -> SessionKey:
        """Whose it is."""
        return self.request.key

    @property
    def runs(self) -> bool:
        """Whether the engine has it."""
        return self.finish is None and self.parked is None

    @property
    def epoch(self) -> int:
        """Which incarnation it is."""
        return self.request.epoch

    @property
    def weight(self) -> int:
        """What keeping it takes, in ids."""
        return len(self.ids) + _LOGPROB_WEIGHT * len(self.logprobs)

    def logprobs_between(self, start: int, end: int) -> list[TokenLogprob]:
        """Of the ids at these positions, less those that came with Open."""
        opened = len(self.request.ids)
        return self.logprobs[max(0, start - opened) : max(0, end - opened)]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Somebody reads from now on."""
        self.subscribers[subscriber] = None
        self.unread_since = None

    def unsubscribe(self, subscriber: Subscriber, now: float) -> None:
        """One reader fewer."""
        self.subscribers.pop(subscriber, None)
        if not self.subscribers:
            self.unread_since = now


class Registry:
    """All sessions of this worker by key and by handle.

    Those that are parked or finished are kept, the oldest of them forgotten where they are too many.

    Args:
        most_kept: of them.
        most_kept_ids: ids of them all; one with log-probabilities counts as several.
    """

    def __init__(self, most_kept: int = _MOST_KEPT, most_kept_ids: int = _MOST_KEPT_IDS) -> None:
        self._by_key: dict[SessionKey, Mirror] = {}
        self._by_handle: dict[int, Mirror] = {}
        self._epochs: OrderedDict[SessionKey, int] = OrderedDict()
        self._cancelled_unopened: set[SessionKey] = set()  # under the epoch that is remembered of them
        self._handles = 0
        self._running: dict[int, Mirror] = {}
        self._kept: OrderedDict[int, float] = OrderedDict()  # since when, the oldest first
        self._kept_ids = 0
        self._parked: set[int] = set()  # of those that are kept
        self._most_kept = most_kept
        self._most_kept_ids = most_kept_ids

    @property
    def running(self) -> int:
        """Sessions that the engine has."""
        return len(self._running)

    @property
    def parked(self) -> int:
        """Sessions that nobody reads and that go on where somebody does; from any thread."""
        return len(self._parked)

    def find(self, key: SessionKey) -> Mirror | None:
        """The session of this key, if it is known here."""
        return self._by_key.get(key)

    def left_over(self, key: SessionKey, epoch: int) -> list[Mirror]:
        """The session's other choices that an earlier request than that of this epoch has not ended."""
        keys = [key._replace(choice=choice) for choice in range(MAX_CHOICES) if choice != key.choice]
        found = [mirror for other in keys if (mirror := self.find(other)) is not None]
        return [mirror for mirror in found if mirror.epoch < epoch and mirror.finish is None]

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
        if epoch > highest:
            self._cancelled_unopened.discard(key)
        self._epochs[key] = epoch
        self._epochs.move_to_end(key)
        if len(self._epochs) > _EPOCHS_REMEMBERED:
            forgotten, _ = self._epochs.popitem(last=False)
            self._cancelled_unopened.discard(forgotten)

    def cancel_unopened(self, key: SessionKey) -> None:
        """A Cancel came that has nothing to end: what is opened under its epoch, the latest, is to end."""
        self._cancelled_unopened.add(key)

    def is_cancelled_unopened(self, key: SessionKey) -> bool:
        """Whether what is opened under the latest epoch is to end."""
        return key in self._cancelled_unopened

    def new_handle(self) -> int:
        """A number that no session here has had."""
        self._handles += 1
        return self._handles

    def add(self, mirror: Mirror) -> None:
        """A new running session. One of an older epoch has to be superseded first."""
        assert mirror.key not in self._by_key, f"session {mirror.key} is here already"
        self._by_key[mirror.key] = self._by_handle[mirror.handle] = self._running[mirror.handle] = mirror

    def supersede(self, mirror: Mirror) -> None:
        """Forgets a session that a higher epoch takes over, and tells its readers."""
        self.forget(mirror)
        for subscriber in mirror.subscribers:
            subscriber.superseded()

    def absorb(self, update: Update, now: float) -> Mirror | None:
        """Takes over what a step committed; None where the session is no longer known here."""
        mirror = self._by_handle.get(update.handle)
        if mirror is None or not mirror.runs:
            return None
        assert update.position == len(mirror.ids) or not update.ids, (
            f"{update} does not continue {mirror.key}"
        )
        mirror.ids.extend(update.ids)
        mirror.credits.extend(update.credits)
        mirror.logprobs.extend(update.logprobs)
        if update.ids:
            mirror.rounds, mirror.admitted = update.rounds, update.admitted
        if update.parked is not None:
            mirror.parked = update.parked
            self._keep(mirror, now)
        if update.finish is not None:
            self.finished(mirror, update.finish, now)
        for subscriber in mirror.subscribers:
            subscriber.touched()
        return mirror

    def finished(self, mirror: Mirror, finish: Finish, now: float) -> None:
        """The session ended; its last message can still be read for a while."""
        self._keep_no_longer(mirror.handle)
        mirror.finish, mirror.parked, mirror.grammar = finish, None, None
        self._keep(mirror, now)

    def resumed(self, mirror: Mirror) -> None:
        """A parked session is the engine's again."""
        self._keep_no_longer(mirror.handle)
        mirror.parked = None
        self._running[mirror.handle] = mirror

    def orphans(self, now: float, grace_s: float) -> list[Mirror]:
        """Running sessions that nobody has read for so long."""
        running = self._running.values()
        return [m for m in running if m.unread_since is not None and now - m.unread_since > grace_s]

    def forget_kept(self, now: float, lease_s: float) -> None:
        """Forgets those that were parked or finished so long ago, or are too many; not their epochs."""
        while self._kept:
            handle, since = next(iter(self._kept.items()))
            many = len(self._kept) > self._most_kept or self._kept_ids > self._most_kept_ids
            if not many and now - since <= lease_s:
                return
            self.forget(self._by_handle[handle])

    def forget(self, mirror: Mirror) -> None:
        """Drops a session, whatever it does."""
        if mirror.handle not in self._by_handle:
            return
        self._keep_no_longer(mirror.handle)
        self._running.pop(mirror.handle, None)
        del self._by_handle[mirror.handle], self._by_key[mirror.key]

    def _keep(self, mirror: Mirror, now: float) -> None:
        self._running.pop(mirror.handle, None)
        self._kept[mirror.handle] = now
        if mirror.parked is not None:
            self._parked.add(mirror.handle)
        self._kept_ids += mirror.weight

    def _keep_no_longer(self, handle: int) -> None:
        self._parked.discard(handle)
        if self._kept.pop(handle, None) is not None:
            self._kept_ids -= self._by_handle[handle].weight
