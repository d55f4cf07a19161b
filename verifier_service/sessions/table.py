"""What the event loop knows of each session: a view of its committed tokens, its epoch, and its readers.

Pure: the engine's reports feed the table, and the server asks the table. Knows nothing of gRPC or threads.
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
from speculative.stop import FinishReason
from verifier_service.engine.messages import Finish, Update
from verifier_service.sessions.request import SessionRequest, SourceAddress

_EPOCHS_REMEMBERED = 65_536
_MOST_KEPT = 16_384
_MOST_KEPT_IDS = 1_000_000
# The log-probabilities of a token take some 300 bytes, the token itself takes 40.
_LOGPROB_WEIGHT = 8


class ViewCursor(Protocol):
    """A reader's place in one session."""

    def updated(self) -> None:
        """The session has new tokens, or has ended."""

    def superseded(self) -> None:
        """The session was taken over under a higher epoch."""


@dataclass(slots=True, eq=False)
class SessionView:
    """A session's committed tokens and state, as its readers see them."""

    handle: int
    """Number of this incarnation of the session in this worker."""
    request: SessionRequest
    source_names: tuple[str, ...]
    """Names of the sources: source index k is source_names[k - 1]."""
    sources: dict[int, SourceAddress]
    """Sources in use, by source index."""
    unread_since: float | None
    """Since when nobody reads the session, in seconds on the caller's clock; None while somebody does."""
    grammar: Matcher | None = None
    """The grammar of the session's text, after its last token; None: any text. The engine uses the matcher
    while the session runs."""
    ids: list[int] = field(init=False)
    """All committed tokens, from the prompt on."""
    opened: int = field(init=False)
    """Number of tokens that were committed when the session opened."""
    token_sources: bytearray = field(init=False)
    """The source index of each token; 0 for tokens of the target itself and for those that came with Open."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of each token since Open, where the request asked for them."""
    finish: Finish | None = None
    """How the session ended; None while it is open."""
    parked: UsageCount | None = None
    """The usage so far of a parked session; None: the session is not parked."""
    cancelled: bool = False
    """Whether the engine was asked to cancel the session, which it may have parked by then."""
    rounds: int = 0
    """Rounds so far."""
    admitted: int = 0
    """Drafted nodes that these rounds computed."""
    collected: int = 0
    """Number of tokens, from the first on, that a learning head has seen for its lessons."""
    deadline_s: float | None = None
    """When the session is to end, in seconds on the engine's clock; None: never."""
    traceparent: str = ""
    """The trace context of the session's span; empty where none is recorded."""
    cursors: dict[ViewCursor, None] = field(default_factory=dict)
    """Cursors of the readers, in the order in which they came and are notified."""

    def __post_init__(self) -> None:
        self.ids = list(self.request.ids)
        if self.request.score_from is not None:
            del self.ids[self.request.score_from :]  # the engine commits the others with their scores
        self.opened = len(self.ids)
        self.token_sources = bytearray(len(self.ids))

    @property
    def key(self) -> SessionKey:
        """The session's key: tenant, session and choice."""
        return self.request.key

    @property
    def runs(self) -> bool:
        """Whether the engine has the session."""
        return self.finish is None and self.parked is None

    @property
    def epoch(self) -> int:
        """The epoch of the session's Open."""
        return self.request.epoch

    @property
    def weight(self) -> int:
        """Memory that the view takes, in tokens without log-probabilities."""
        return len(self.ids) + _LOGPROB_WEIGHT * len(self.logprobs)

    def logprobs_between(self, start: int, end: int) -> list[TokenLogprob]:
        """Log-probabilities of the tokens at positions `start` to `end`; tokens of the Open have none."""
        return self.logprobs[max(0, start - self.opened) : max(0, end - self.opened)]

    def add_cursor(self, cursor: ViewCursor) -> None:
        """Adds a reader's cursor: the session is read from now on."""
        self.cursors[cursor] = None
        self.unread_since = None

    def remove_cursor(self, cursor: ViewCursor, now: float) -> None:
        """Removes a reader's cursor; after the last one the session counts as unread since `now`."""
        self.cursors.pop(cursor, None)
        if not self.cursors:
            self.unread_since = now


class SessionTable:
    """All sessions of this worker, by key and by handle.

    Parked and finished sessions are kept for a while; where there are too many, the oldest are forgotten.

    Args:
        most_kept: how many parked and finished sessions are kept.
        most_kept_ids: how many tokens these may have together; log-probabilities count as further tokens.
    """

    def __init__(self, most_kept: int = _MOST_KEPT, most_kept_ids: int = _MOST_KEPT_IDS) -> None:
        self._by_key: dict[SessionKey, SessionView] = {}
        self._by_handle: dict[int, SessionView] = {}
        self._epochs: OrderedDict[SessionKey, int] = OrderedDict()
        self._cancelled_unopened: set[SessionKey] = set()  # under the epoch in `_epochs`
        self._handles = 0
        self._running: dict[int, SessionView] = {}
        self._kept: OrderedDict[int, float] = OrderedDict()  # since when, by handle, the oldest first
        self._kept_ids = 0
        self._parked: set[int] = set()  # handles in `_kept`
        self._most_kept = most_kept
        self._most_kept_ids = most_kept_ids

    @property
    def running(self) -> int:
        """How many sessions the engine has."""
        return len(self._running)

    @property
    def parked(self) -> int:
        """How many sessions are parked until somebody reads them; from any thread."""
        return len(self._parked)

    def find(self, key: SessionKey) -> SessionView | None:
        """The session of this key, or None for an unknown key."""
        return self._by_key.get(key)

    def older_choices(self, key: SessionKey, epoch: int) -> list[SessionView]:
        """The other choices of this session that are still open under an epoch before `epoch`."""
        keys = [key._replace(choice=choice) for choice in range(MAX_CHOICES) if choice != key.choice]
        found = [view for other in keys if (view := self.find(other)) is not None]
        return [view for view in found if view.epoch < epoch and view.finish is None]

    def by_handle(self, handle: int) -> SessionView | None:
        """The session of this handle; None for a session that was taken over or forgotten."""
        return self._by_handle.get(handle)

    def fence(self, key: SessionKey, epoch: int, now_ms: int) -> None:
        """Fences off all epochs before `epoch` for this key; `now_ms` is the wall clock in milliseconds.

        Raises StaleEpoch for an epoch below the highest one seen for this key. Raises InvalidRequest for an
        epoch from the future, which fences nobody off.
        """
        checked_epoch(epoch, now_ms)
        # A session that is still here fences by its own epoch, even if `_epochs` has dropped its key.
        view = self.find(key)
        highest = max(self._epochs.get(key, 0), 0 if view is None else view.epoch)
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
        """Cancels ahead of its Open whatever will be opened for this key under its latest epoch."""
        self._cancelled_unopened.add(key)

    def is_cancelled_unopened(self, key: SessionKey) -> bool:
        """Whether an Open of this key under its latest epoch was cancelled ahead."""
        return key in self._cancelled_unopened

    def new_handle(self) -> int:
        """A handle that no session of this worker has had."""
        self._handles += 1
        return self._handles

    def add(self, view: SessionView) -> None:
        """Adds a running session. A session of the same key has to be superseded first."""
        assert view.key not in self._by_key, f"session {view.key} is here already"
        self._by_key[view.key] = self._by_handle[view.handle] = self._running[view.handle] = view

    def supersede(self, view: SessionView) -> None:
        """Forgets a session that a higher epoch takes over, and notifies its readers.

        Readers of a session that had ended before are not notified: they are sent its end.
        """
        self.forget(view)
        for cursor in view.cursors if view.finish is None else ():
            cursor.superseded()

    def absorb(self, update: Update, now: float) -> SessionView | None:
        """Takes over what a step did to one session; returns the session's view, or None where it is gone."""
        view = self._by_handle.get(update.handle)
        if view is None or not view.runs:
            return None
        assert update.position == len(view.ids) or not update.ids, f"{update} does not continue {view.key}"
        view.ids.extend(update.ids)
        view.token_sources.extend(update.token_sources)
        view.logprobs.extend(update.logprobs)
        if update.ids:
            view.rounds, view.admitted = update.rounds, update.admitted
        if update.parked is not None and view.cancelled:  # the Cancel came behind the Park
            self.finish(view, Finish(FinishReason.CANCELLED, update.parked), now)
        elif update.parked is not None:
            view.parked = update.parked
            self._keep(view, now)
        if update.finish is not None:
            self.finish(view, update.finish, now)
        for cursor in view.cursors:
            cursor.updated()
        return view

    def finish(self, view: SessionView, finish: Finish, now: float) -> None:
        """Ends a session, which stays readable for a while."""
        self._keep_no_longer(view.handle)
        view.finish, view.parked, view.grammar = finish, None, None
        self._keep(view, now)

    def resume(self, view: SessionView) -> None:
        """Marks a parked session as running again."""
        self._keep_no_longer(view.handle)
        view.parked = None
        self._running[view.handle] = view

    def orphans(self, now: float, grace_s: float) -> list[SessionView]:
        """The running sessions that nobody has read for more than `grace_s` seconds."""
        running = self._running.values()
        return [v for v in running if v.unread_since is not None and now - v.unread_since > grace_s]

    def forget_kept(self, now: float, lease_s: float) -> None:
        """Forgets sessions that were parked or finished more than `lease_s` seconds ago.

        Where too many are kept, the oldest ones go too. Epochs stay remembered.
        """
        while self._kept:
            handle, since = next(iter(self._kept.items()))
            too_many = len(self._kept) > self._most_kept or self._kept_ids > self._most_kept_ids
            if not too_many and now - since <= lease_s:
                return
            self.forget(self._by_handle[handle])

    def forget(self, view: SessionView) -> None:
        """Drops a session in any state."""
        if view.handle not in self._by_handle:
            return
        self._keep_no_longer(view.handle)
        self._running.pop(view.handle, None)
        del self._by_handle[view.handle], self._by_key[view.key]

    def _keep(self, view: SessionView, now: float) -> None:
        self._running.pop(view.handle, None)
        self._kept[view.handle] = now
        if view.parked is not None:
            self._parked.add(view.handle)
        self._kept_ids += view.weight

    def _keep_no_longer(self, handle: int) -> None:
        self._parked.discard(handle)
        if self._kept.pop(handle, None) is not None:
            self._kept_ids -= self._by_handle[handle].weight
