"""What a link sends to its source next. Updates are merged per session, so the queue never outgrows them.

Tokens of a session that were not sent yet are extended, never queued twice. While a source rests, its tokens
are held, and a session that begins meanwhile is followed only once the source is awake. An alias is the
link's own number for a session on one stream. Updates of many sessions are taken in batches, whose size gRPC
and the source's event loop can bear. Pure; knows nothing of streams or protobuf.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.wire.incoming.shape import BATCH_BYTES, BATCH_ENTRIES
from speculative.observed import Observed, OffPathRow, TopIds

# A freed alias is used again only after this many others were freed: drafts that are still under way must not
# meet another session. The number is small, so that a few dozen sessions keep their aliases below 128, which
# is one byte on the wire.
_ALIASES_AT_REST = 32
_MOST_TOPS = 256
"""Unsent tokens of a session, counted from the last, that keep what the target found likeliest there."""
_MOST_OFF_PATH = 512
"""Unsent rows off the path that are kept for a session, the latest ones."""
_ENTRY_BYTES = 48
"""The most bytes of a Progress without its tokens and rows."""
_ID_BYTES = 5
_TOP_BYTES = 6
_ROW_BYTES = 16
"""The bytes of a row off the path without its likeliest ids."""


@dataclass(slots=True)
class UnsentTokens:
    """Committed tokens of one session that the source does not have yet."""

    position: int
    """Position of the first of them."""
    ids: list[int]
    prefix_hash: int
    """Hash of the session's tokens up to the last of them."""
    tops: deque[TopIds] = field(default_factory=lambda: deque(maxlen=_MOST_TOPS))
    """What the target found likeliest at the places of the last of them."""
    off_path: deque[OffPathRow] = field(default_factory=lambda: deque(maxlen=_MOST_OFF_PATH))
    """What the target said after other tokens."""

    @property
    def most_bytes(self) -> int:
        """The most bytes that the tokens take as a Progress."""
        tops = _TOP_BYTES * sum(len(top.ids) for top in self.tops)
        rows = sum(_ROW_BYTES + 4 * len(row.top_ids) for row in self.off_path)
        return _ENTRY_BYTES + _ID_BYTES * len(self.ids) + tops + rows

    def observe(self, said: Observed | None) -> None:
        """Adds what the target said about tokens that were just added; None: nothing is known of them."""
        if said is None:
            self.tops.clear()  # those that are kept have to belong to the last tokens
        else:
            self.tops.extend(said.tops)
            self.off_path.extend(said.off_path)


@dataclass(frozen=True, slots=True)
class NextUpdate:
    """The content of one AttachRequest."""

    follow: tuple[int, ...]
    """Aliases of the sessions to follow from now on."""
    progress: dict[int, UnsentTokens]
    """Committed tokens by alias."""
    end: tuple[int, ...]
    """Aliases of the sessions that ended."""


@dataclass(slots=True)
class UpdateQueue:
    """The state of one stream's next update. Every new stream starts with a new queue."""

    follow_bytes: Callable[[int], int] = lambda handle: 0
    """The most bytes of the Follow that introduces a session, by handle."""
    handles: dict[int, int] = field(default_factory=dict)
    """Session handle by alias, for the sessions that this stream follows."""
    _aliases: dict[int, int] = field(default_factory=dict)
    _free: deque[int] = field(default_factory=deque)
    _highest: int = 0
    _follow: dict[int, None] = field(default_factory=dict)
    _progress: dict[int, UnsentTokens] = field(default_factory=dict)
    _held: dict[int, UnsentTokens] = field(default_factory=dict)
    """Tokens that wait until the source has rested, by alias."""
    _end: list[int] = field(default_factory=list)
    _later: set[int] = field(default_factory=set)
    """Handles of the sessions to follow once the source has rested."""
    _lessons: list[int] = field(default_factory=list)
    """Aliases of ended sessions that are still to be followed, so that the source can learn from them."""

    def follow_later(self, handle: int) -> None:
        """Follows a session once the source has rested."""
        self._later.add(handle)

    def follow(self, handle: int) -> None:
        """Follows a session from the next update on, with the tokens that the session has by then."""
        self._later.discard(handle)
        if handle in self._aliases:
            return
        if len(self._free) > _ALIASES_AT_REST:
            alias = self._free.popleft()
        else:
            self._highest = alias = self._highest + 1
        self.handles[alias] = handle
        self._aliases[handle] = alias
        self._follow[alias] = None

    def progress(
        self,
        handle: int,
        position: int,
        ids: tuple[int, ...],
        prefix_hash: int,
        hold: bool = False,
        said: Observed | None = None,
    ) -> bool:
        """Adds committed tokens of a session; with `hold` they wait until the source has rested.

        `said` is what the target said in their round, for a source that wants to know. Returns whether there
        is something to send now.
        """
        if handle in self._later:
            if not hold:
                self.follow(handle)
            return not hold
        alias = self._aliases.get(handle)
        if alias is None or alias in self._follow:
            return False  # a follow that was not sent yet will carry these tokens
        unsent = self._progress.get(alias) or self._held.pop(alias, None)
        if unsent is None:
            unsent = UnsentTokens(position, list(ids), prefix_hash)
        else:
            unsent.ids.extend(ids)
            unsent.prefix_hash = prefix_hash
        unsent.observe(said)
        send = not hold or alias in self._progress
        (self._progress if send else self._held)[alias] = unsent
        return send

    def end(self, handle: int, *, flush: bool = False) -> bool:
        """Ends a session; with `flush` the source first gets every token that it lacks.

        Returns whether there is something to send now.
        """
        if flush and handle in self._later:
            self.follow(handle)
        self._later.discard(handle)
        alias = self._aliases.pop(handle, None)
        if alias is None:
            return False
        if flush and alias in self._follow:
            self._lessons.append(alias)
            return True
        del self.handles[alias]
        unsent = self._progress.pop(alias, None) or self._held.pop(alias, None)
        if flush and unsent is not None:
            self._progress[alias] = unsent
        if alias in self._follow:
            del self._follow[alias]
            self._free.append(alias)
            return False
        self._end.append(alias)
        return True

    def is_unannounced(self, handle: int) -> bool:
        """Whether a session is to be followed and the source does not know of the session yet."""
        return handle in self._later or self._aliases.get(handle) in self._follow

    def alias_of(self, handle: int) -> int:
        """The session's alias on this stream; 0 for a session that the stream does not follow."""
        return self._aliases.get(handle, 0)

    def was_used(self, alias: int) -> bool:
        """Whether this stream ever used the alias: a draft under a used alias is late, not malformed."""
        return 1 <= alias <= self._highest

    def take(self) -> NextUpdate | None:
        """Takes the next update from the queue; None for an empty queue.

        An update has BATCH_BYTES and BATCH_ENTRIES at most; an entry that is larger goes alone.

        The source reads progress first, then ends, then follows. So do the batches: a session's tokens go out
        before its end, and its Follow before anything else of that session.
        """
        if not (self._follow or self._progress or self._end):
            return None
        room = _Room()
        progress = {}
        for alias, unsent in self._progress.items():
            if not room.take(unsent.most_bytes):
                break
            progress[alias] = unsent
        for alias in progress:
            del self._progress[alias]
        end = self._take_ends(room)
        follow = self._take_follows(room)
        return NextUpdate(follow, progress, end)

    def _take_ends(self, room: "_Room") -> tuple[int, ...]:
        """Ends of sessions whose tokens have all been taken."""
        taken, left = list[int](), list[int]()
        for alias in self._end:
            ready = alias not in self._progress and room.take(_ID_BYTES)
            (taken if ready else left).append(alias)
        self._end = left
        for alias in taken:
            self.handles.pop(alias, None)
        self._free.extend(taken)
        return tuple(taken)

    def _take_follows(self, room: "_Room") -> tuple[int, ...]:
        """Sessions to follow; the end of one that the source only learns from comes in the next update."""
        taken = []
        for alias in self._follow:
            if not room.take(self.follow_bytes(self.handles[alias])):
                break
            taken.append(alias)
        for alias in taken:
            del self._follow[alias]
        self._end += [alias for alias in self._lessons if alias not in self._follow]
        self._lessons = [alias for alias in self._lessons if alias in self._follow]
        return tuple(taken)


class _Room:
    """What still fits one update."""

    def __init__(self) -> None:
        self._bytes = BATCH_BYTES
        self._entries = BATCH_ENTRIES

    def take(self, size: int) -> bool:
        """Takes the room of one entry; False where the update is full. An empty update takes any entry."""
        if self._entries <= 0 or (self._bytes < size and self._entries < BATCH_ENTRIES):
            return False
        self._bytes -= size
        self._entries -= 1
        return True
