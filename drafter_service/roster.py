"""Who is followed, on which stream, under which alias; whose cache is kept a while after a stream broke.

One session is followed once: whoever follows it last, under an epoch no older, has it, and inherits what the
cache holds of the ids that both agree on. Knows nothing of passes, threads, sockets or clocks (the time is an
argument).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from drafter_service.draft_tree import Growth
from drafter_service.drafters import Drafter
from drafter_service.follower import Cache, Follower, check_readable
from outrider.source.events import Follow, NotFollowed, Request
from outrider.wire.codec import SessionKey
from speculative.errors import Overloaded

SPARE = 64
"""Cache room beyond committed ids that a session takes from the start, for drafted nodes."""


@dataclass(slots=True, eq=False)
class Followed:
    """A session that is being followed."""

    stream: int
    alias: int
    key: SessionKey
    follower: Follower

    @property
    def epoch(self) -> int:
        """Which incarnation of the session this is."""
        return self.follower.request.epoch


@dataclass(frozen=True, slots=True)
class Kept:
    """A cache without a stream."""

    follower: Follower
    until_s: float


class Roster:
    """All sessions of one drafter.

    Args:
        grace_s: how long a cache outlives its stream.
        most: sessions followed or kept at a time.
    """

    def __init__(self, drafter: Drafter, growth: Growth, *, grace_s: float, most: int) -> None:
        self._drafter = drafter
        self._growth = growth
        self._grace_s = grace_s
        self._most = most
        self._by_alias: dict[tuple[int, int], Followed] = {}
        self._by_key: dict[SessionKey, Followed] = {}
        self._kept: dict[SessionKey, Kept] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._by_alias)

    def __iter__(self) -> Iterator[Followed]:
        return iter(self._by_alias.values())

    @property
    def unread(self) -> int:
        """Committed ids of all sessions that are still to be read; from any thread."""
        return sum(followed.follower.unread for followed in list(self._by_alias.values()))

    @property
    def kept(self) -> int:
        """Caches that wait for their session to be followed again."""
        return len(self._kept)

    def get(self, stream: int, alias: int) -> Followed | None:
        """The session behind an alias."""
        return self._by_alias.get((stream, alias))

    def follow(self, follow: Follow, now_s: float) -> tuple[Followed, Followed | None]:
        """Starts to follow; also returns who had the session on another stream or alias until now.

        Raises:
            NotFollowed: why not; whatever was followed still is.
            Overloaded: no memory; nobody follows this session now.
        """
        request = follow.request
        check_readable(request.ids, 0, request.vocabulary_size, self._drafter.abilities)
        holder = self._by_key.get(follow.key)
        if holder is not None and holder.epoch > request.epoch:
            raise NotFollowed(
                f"epoch {request.epoch:016x} of session {follow.key} is older than {holder.epoch:016x}, "
                f"which is followed already"
            )
        namesake = self.get(follow.stream, follow.alias)
        if namesake is None and holder is None and len(self) >= self._most:
            raise NotFollowed(f"this drafter follows {self._most} sessions already; that is its limit")
        for earlier in {id(one): one for one in (namesake, holder) if one is not None}.values():
            self.let_go(earlier, now_s)
        follower = self._follower(follow.key, request)
        followed = Followed(follow.stream, follow.alias, follow.key, follower)
        self._by_alias[follow.stream, follow.alias] = followed
        self._by_key[follow.key] = followed
        return followed, holder if holder is not namesake else None

    def end(self, followed: Followed) -> None:
        """The session is over: its memory is free at once."""
        self._remove(followed)
        self._drafter.close(followed.follower.cache)

    def let_go(self, followed: Followed, now_s: float) -> None:
        """The session may go on elsewhere: its cache is kept for the grace period."""
        self._remove(followed)
        followed.follower.cache.drop_nodes()
        self._discard(followed.key)
        self._kept[followed.key] = Kept(followed.follower, now_s + self._grace_s)
        if len(self._kept) > self._most:
            self.free_oldest()

    def let_go_stream(self, stream: int, now_s: float) -> None:
        """A stream broke: so it is for all sessions on it."""
        for followed in [one for one in self if one.stream == stream]:
            self.let_go(followed, now_s)

    def expire(self, now_s: float) -> float | None:
        """Frees caches whose grace is over; returns when the next one ends."""
        for key in [key for key, kept in self._kept.items() if kept.until_s <= now_s]:
            self._discard(key)
        return min((kept.until_s for kept in self._kept.values()), default=None)

    def close(self) -> None:
        """Frees everything."""
        for followed in list(self):
            self.end(followed)
        for key in list(self._kept):
            self._discard(key)

    def _follower(self, key: SessionKey, request: Request) -> Follower:
        kept = self._kept.pop(key, None)
        if kept is None:
            reserve = min(len(request.ids) + SPARE, self._drafter.abilities.max_length)
            cache = self._open(reserve)
        else:
            cache = kept.follower.cache
            # The last id must be computed again: its logits are what the tree starts from.
            agreed = min(kept.follower.agreed_length(request.ids), cache.length, len(request.ids) - 1)
            self._drafter.rewind(cache, agreed)
        try:
            return Follower(request, cache, self._drafter.abilities, self._growth)
        except BaseException:
            self._drafter.close(cache)
            raise

    def _open(self, reserve: int) -> Cache:
        """Caches that only wait make room, the oldest first."""
        while True:
            try:
                return self._drafter.open(reserve)
            except Overloaded:
                if not self.free_oldest():
                    raise

    def free_oldest(self) -> bool:
        """Frees the cache that has waited longest; False where none waits."""
        for key in self._kept:
            self._discard(key)
            return True
        return False

    def _remove(self, followed: Followed) -> None:
        self._by_alias.pop((followed.stream, followed.alias), None)
        if self._by_key.get(followed.key) is followed:
            del self._by_key[followed.key]

    def _discard(self, key: SessionKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._drafter.close(kept.follower.cache)
