"""What one link has to tell its source next: gathered between two messages, so it is bounded by the sessions.

Progress of a session that was not sent yet is extended, never queued; that of a source that rests is held,
and a session that begins meanwhile is followed only when there is something to tell it. Aliases are this
link's own names for sessions on one stream. Pure; knows nothing of streams or protobuf.
"""

from collections import deque
from dataclasses import dataclass, field

# Freed aliases rest until so many others were freed, so that drafts still under way do not meet another
# session. Small enough that a few dozen sessions keep their aliases below 128, one byte on the wire.
_RESTING = 32


@dataclass(slots=True)
class Progressed:
    """Ids of one session that the source has not been told."""

    position: int
    ids: list[int]
    prefix_hash: int


@dataclass(frozen=True, slots=True)
class Message:
    """One AttachRequest: aliases to follow, progress by alias, aliases that ended."""

    follow: tuple[int, ...]
    progress: dict[int, Progressed]
    end: tuple[int, ...]


@dataclass(slots=True)
class Outgoing:
    """The state of one stream's next message. A new stream starts from a new one."""

    handles: dict[int, int] = field(default_factory=dict)
    """Alias to session handle, of those followed on this stream."""
    _aliases: dict[int, int] = field(default_factory=dict)
    _free: deque[int] = field(default_factory=deque)
    _highest: int = 0
    _follow: dict[int, None] = field(default_factory=dict)
    _progress: dict[int, Progressed] = field(default_factory=dict)
    _held: dict[int, Progressed] = field(default_factory=dict)
    _end: list[int] = field(default_factory=list)
    _later: set[int] = field(default_factory=set)
    """Handles of sessions to follow when there is progress to tell."""
    _lessons: list[int] = field(default_factory=list)
    """Aliases of sessions that are over and still to be followed, so that the source may learn from them."""

    def follow_later(self, handle: int) -> None:
        """Follow a session once there is progress to tell."""
        self._later.add(handle)

    def follow(self, handle: int) -> None:
        """Follow a session from the next message on, with the ids it has then."""
        self._later.discard(handle)
        if handle in self._aliases:
            return
        if len(self._free) > _RESTING:
            alias = self._free.popleft()
        else:
            self._highest = alias = self._highest + 1
        self.handles[alias] = handle
        self._aliases[handle] = alias
        self._follow[alias] = None

    def progress(
        self, handle: int, position: int, ids: tuple[int, ...], prefix_hash: int, tell: bool = True
    ) -> bool:
        """A session's ids grew; without `tell` they are kept until the source is to be told of more.

        Returns whether the source has to be told now.
        """
        if handle in self._later:
            if tell:
                self.follow(handle)
            return tell
        alias = self._aliases.get(handle)
        if alias is None or alias in self._follow:
            return False  # a follow that was not sent yet will carry these ids
        untold = self._progress.get(alias) or self._held.pop(alias, None)
        if untold is None:
            untold = Progressed(position, list(ids), prefix_hash)
        else:
            untold.ids.extend(ids)
            untold.prefix_hash = prefix_hash
        told = tell or alias in self._progress
        (self._progress if told else self._held)[alias] = untold
        return told

    def end(self, handle: int, *, told: bool = False) -> bool:
        """A session is no longer followed; where `told`, the source hears first what it has not been told.

        Returns whether the source has to be told of it.
        """
        if told and handle in self._later:
            self.follow(handle)
        self._later.discard(handle)
        alias = self._aliases.pop(handle, None)
        if alias is None:
            return False
        if told and alias in self._follow:
            self._lessons.append(alias)
            return True
        del self.handles[alias]
        untold = self._progress.pop(alias, None) or self._held.pop(alias, None)
        if told and untold is not None:
            self._progress[alias] = untold
        if alias in self._follow:
            del self._follow[alias]
            self._free.append(alias)
            return False
        self._end.append(alias)
        return True

    def is_untold(self, handle: int) -> bool:
        """Whether the source does not know of the session yet, and is to."""
        return handle in self._later or self._aliases.get(handle) in self._follow

    def alias_of(self, handle: int) -> int:
        """What a session is called on this stream; 0: it is not followed there."""
        return self._aliases.get(handle, 0)

    def was_used(self, alias: int) -> bool:
        """Whether this stream ever had the alias: what comes under it is late rather than malformed."""
        return 1 <= alias <= self._highest

    def take(self) -> Message | None:
        """The next message, or None where there is nothing to say: progress, then ends, then follows."""
        if not (self._follow or self._progress or self._end):
            return None
        message = Message(tuple(self._follow), self._progress, tuple(self._end))
        for alias in self._end:
            self.handles.pop(alias, None)
        self._free.extend(self._end)
        self._follow, self._progress = {}, {}
        self._end, self._lessons = self._lessons, []
        return message
