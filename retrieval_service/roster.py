"""Who is followed, on which stream, under which alias; and what of each session's output is kept already.

One session is followed once: whoever follows it last, under an epoch no older, has it. A session whose stream
broke is remembered for a while, so that its output is kept once, and in one piece, when it is followed again.
Knows nothing of memories, threads, sockets or clocks (the time is an argument).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from outrider.source.events import Follow, NotFollowed
from outrider.wire.codec import SessionKey
from retrieval_service.follower import Follower
from retrieval_service.ranking import Shape


@dataclass(slots=True, eq=False)
class Followed:
    """A session that is being followed."""

    stream: int
    alias: int
    key: SessionKey
    follower: Follower
    kept: int
    """Positions below this are kept, or were never to be."""
    learns: bool
    """Whether output is kept from here on."""

    @property
    def epoch(self) -> int:
        """Which incarnation of the session this is."""
        return self.follower.request.epoch

    def take_unkept(self) -> list[int]:
        """Output that is to be kept and was not yet; none where it may not be."""
        if not self.learns:
            return []
        fresh = self.follower.ids_from(self.kept)
        self.kept += len(fresh)
        return fresh


@dataclass(frozen=True, slots=True)
class Left:
    """A session without a stream."""

    follower: Follower
    kept: int
    learns: bool
    until_s: float


class Roster:
    """All sessions of this service.

    Args:
        grace_s: how long a session is remembered after its stream broke.
        most: sessions followed, and sessions remembered, at a time.
        max_length: most ids of a session.
    """

    def __init__(self, shape: Shape, *, grace_s: float, most: int, max_length: int) -> None:
        self._shape = shape
        self._grace_s = grace_s
        self._most = most
        self._max_length = max_length
        self._by_alias: dict[tuple[int, int], Followed] = {}
        self._by_key: dict[SessionKey, Followed] = {}
        self._left: dict[SessionKey, Left] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._by_alias)

    def __iter__(self) -> Iterator[Followed]:
        return iter(list(self._by_alias.values()))

    def get(self, stream: int, alias: int) -> Followed | None:
        """The session behind an alias."""
        return self._by_alias.get((stream, alias))

    def follow(self, follow: Follow, now_s: float) -> tuple[Followed, Followed | None, bool]:
        """Starts to follow.

        Returns the session, who had it on another stream or alias until now, and whether what was kept of a
        session of this name is of other ids: that is over.

        Raises:
            NotFollowed: why not; whatever was followed still is.
        """
        request, key = follow.request, follow.key
        if len(request.ids) > self._max_length:
            raise NotFollowed(
                f"the session has {len(request.ids)} ids; this service can follow {self._max_length}"
            )
        holder = self._by_key.get(key)
        if holder is not None and holder.epoch > request.epoch:
            raise NotFollowed(
                f"epoch {request.epoch:016x} of session {key} is older than {holder.epoch:016x}, "
                f"which is followed already"
            )
        namesake = self.get(follow.stream, follow.alias)
        if namesake is None and holder is None and len(self) >= self._most:
            raise NotFollowed(f"this service follows {self._most} sessions already; that is its limit")
        follower = Follower(request, self._shape)
        for earlier in {id(one): one for one in (namesake, holder) if one is not None}.values():
            self.let_go(earlier, now_s)
        left = self._left.pop(key, None)
        kept = request.prompt_length if left is None else _agreed(left, follower)
        over = left is not None and kept == 0
        kept = max(kept, request.prompt_length)
        learns = request.learn and (over or left is None or left.learns)
        followed = Followed(follow.stream, follow.alias, key, follower, kept, learns)
        self._by_alias[follow.stream, follow.alias] = self._by_key[key] = followed
        return followed, holder if holder is not namesake else None, over

    def end(self, followed: Followed) -> None:
        """The session is over."""
        self._by_alias.pop((followed.stream, followed.alias), None)
        if self._by_key.get(followed.key) is followed:
            del self._by_key[followed.key]

    def let_go(self, followed: Followed, now_s: float) -> None:
        """The session may go on elsewhere, or here on another stream."""
        self.end(followed)
        self._left.pop(followed.key, None)
        self._left[followed.key] = Left(
            followed.follower, followed.kept, followed.learns, now_s + self._grace_s
        )

    def let_go_stream(self, stream: int, now_s: float) -> None:
        """A stream broke: so it is for all sessions on it."""
        for followed in self:
            if followed.stream == stream:
                self.let_go(followed, now_s)

    def unlearn(self, tenant: str, session: str | None) -> None:
        """Nothing more is kept of a session with its choices, or of all of the tenant's, while it runs."""
        keys = [one.key for one in self] + list(self._left)
        named = {key for key in keys if key.tenant == tenant and session in (None, key.session)}
        for followed in self:
            followed.learns = followed.learns and followed.key not in named
        for key in named & self._left.keys():
            self._left[key] = replace(self._left[key], learns=False)

    def expire(self, now_s: float) -> tuple[list[SessionKey], float | None]:
        """Sessions that nobody took up again, which are over, and when the next one's time is up."""
        crowded = list(self._left)[: max(0, len(self._left) - self._most)]
        late = [key for key, left in self._left.items() if left.until_s <= now_s]
        late = list(dict.fromkeys([*crowded, *late]))
        for key in late:
            del self._left[key]
        return late, min((left.until_s for left in self._left.values()), default=None)


def _agreed(left: Left, follower: Follower) -> int:
    """How much of what was kept of a session holds for it as it is followed now; 0: none of it."""
    same_prompt = left.follower.request.prompt_length == follower.request.prompt_length
    if not same_prompt or left.kept > follower.length:
        return 0
    return left.kept if left.follower.hash_at(left.kept) == follower.hash_at(left.kept) else 0
