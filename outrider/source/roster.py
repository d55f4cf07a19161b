"""The sessions that a source follows, by stream and alias, and those that it keeps after a stream broke.

A session is followed once: the last follow under an epoch that is no older has it, and gets what the source
still keeps of it. Knows nothing of drafting, threads, sockets or clocks (the time is an argument).
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from outrider.source.events import Follow, NotFollowed
from outrider.source.followed import FollowedIds, FollowedSession, SourceProfile
from outrider.wire.codec import SessionKey

S = TypeVar("S", bound=FollowedSession)


class Roster(Generic[S]):
    """All sessions of one source: those that are followed, and those kept for a grace period.

    Args:
        leave: called with a session whose stream broke, or that was refused; it is kept from now on.
        close: called with a session that is over, so that its memory is freed.
    """

    def __init__(
        self, profile: SourceProfile, leave: Callable[[S], None], close: Callable[[S], None]
    ) -> None:
        self._profile = profile
        self._leave = leave
        self._close = close
        self._by_alias: dict[tuple[int, int], S] = {}
        self._by_key: dict[SessionKey, S] = {}
        self._kept: dict[SessionKey, tuple[S, float]] = {}  # with the end of its grace period; oldest first

    def __len__(self) -> int:
        return len(self._by_alias)

    def __iter__(self) -> Iterator[S]:
        """Followed sessions; safe from any thread, and while sessions come and go."""
        return iter(list(self._by_alias.values()))

    @property
    def kept(self) -> list[S]:
        """Sessions kept for a grace period, oldest first."""
        return [session for session, _ in list(self._kept.values())]

    def get(self, stream: int, alias: int) -> S | None:
        """The session under an alias of a stream; None for an alias that is not followed."""
        return self._by_alias.get((stream, alias))

    def check(self, follow: Follow) -> FollowedIds:
        """The ids of a session that may be followed; changes nothing.

        Raises:
            NotFollowed: the source cannot read the ids, follows a later epoch, has no room, or belongs to
                another tenant.
        """
        request, profile = follow.request, self._profile
        if profile.tenant and follow.key.tenant != profile.tenant:
            # The owner's name stays here: the refusal is another tenant's to read.
            raise NotFollowed(
                f"this {profile.noun} follows only sessions of a tenant other than this session's"
            )
        ids = FollowedIds(request.ids, request.vocabulary_size, profile)
        holder = self._by_key.get(follow.key)
        if holder is not None and holder.request.epoch > request.epoch:
            raise NotFollowed(
                f"epoch {request.epoch:016x} of session {follow.key} is older than "
                f"{holder.request.epoch:016x}, which is followed already"
            )
        namesake = self.get(follow.stream, follow.alias)
        if namesake is None and holder is None and len(self) >= profile.max_sessions:
            raise NotFollowed(
                f"this {profile.noun} follows {profile.max_sessions} sessions already; that is its limit"
            )
        return ids

    def make_way(self, follow: Follow, now_s: float) -> tuple[S | None, S | None]:
        """Lets go of sessions that a follow replaces: the one under its alias, and the same one elsewhere.

        Returns:
            The session as it was followed on another stream or alias until now, which has to be refused;
            and what was kept of the session, which the caller owns from now on. Either can be None.
        """
        namesake, holder = self.get(follow.stream, follow.alias), self._by_key.get(follow.key)
        for earlier in {id(one): one for one in (namesake, holder) if one is not None}.values():
            self.let_go(earlier, now_s)
        kept, _ = self._kept.pop(follow.key, (None, 0.0))
        return holder if holder is not namesake else None, kept

    def add(self, session: S) -> None:
        """Adds a session to the followed ones."""
        self._by_alias[session.stream, session.alias] = session
        self._by_key[session.key] = session

    def end(self, session: S) -> None:
        """Removes and closes a session that is over."""
        self._remove(session)
        self._close(session)

    def let_go(self, session: S, now_s: float) -> None:
        """Keeps a session for the grace period, in which it may come back on another stream."""
        self._remove(session)
        self._leave(session)
        self._discard(session.key)
        self._kept[session.key] = session, now_s + self._profile.grace_s
        if len(self._kept) > self._profile.max_sessions:
            self.free_oldest()

    def let_go_stream(self, stream: int, now_s: float) -> None:
        """Keeps all sessions of a broken stream for the grace period."""
        for session in self:
            if session.stream == stream:
                self.let_go(session, now_s)

    def expire(self, now_s: float) -> float | None:
        """Closes sessions whose grace period is over; returns when the next one's ends."""
        for key in [key for key, (_, until_s) in self._kept.items() if until_s <= now_s]:
            self._discard(key)
        return min((until_s for _, until_s in self._kept.values()), default=None)

    def free_oldest(self) -> bool:
        """Closes the session that has been kept longest; False if none is kept."""
        for key in self._kept:
            self._discard(key)
            return True
        return False

    def close(self) -> None:
        """Closes every session."""
        for session in self:
            self.end(session)
        while self.free_oldest():
            pass

    def _remove(self, session: S) -> None:
        self._by_alias.pop((session.stream, session.alias), None)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]

    def _discard(self, key: SessionKey) -> None:
        session, _ = self._kept.pop(key, (None, 0.0))
        if session is not None:
            self._close(session)
