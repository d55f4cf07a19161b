"""One followed session: its committed ids with the hash over each prefix, and what a source can follow.

Knows nothing of how drafts come about, nor of threads, sockets and clocks.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.source.events import DecodingRequest, Follow, NotFollowed
from speculative import hashing
from speculative.errors import InvalidRequest
from speculative.fragment import Fragment
from speculative.observed import MAX_TOPS

ANY_ID = 2**32 - 1
"""The vocabulary size of a source that can follow and draft any id."""


@dataclass(frozen=True, slots=True)
class SourceProfile:
    """A source's name, and which sessions it can follow; Describe publishes most fields."""

    name: str
    """The source's name in usage and metrics."""
    model: str
    """What drafts, for people."""
    tokenizer_digest: str = ""
    """Digest of the source's tokenizer; sessions with another tokenizer are refused. Empty: any tokenizer."""
    vocabulary_size: int = ANY_ID
    """Drafted ids are below this number."""
    readable_ids: int = ANY_ID
    """Committed ids must be below this number to be read."""
    max_length: int = 1 << 20
    """Longest session that the source follows, in ids."""
    max_sessions: int = 256
    """Sessions followed at a time; as many are kept over broken streams."""
    grace_s: float = 10.0
    """How long a session is kept after its stream broke, in seconds."""
    names: tuple[str, ...] = ()
    """Names that sessions can listen to, if they are others than `name`."""
    numerics: str = ""
    """Device and dtype of the source's model, if it has one."""
    tops: int = 0
    """How many of the target's likeliest ids the source wants of each verified row, 0 to 32; see
    `SourceWorker.observed`."""
    tenant: str = ""
    """The only tenant whose sessions the source follows; empty: any tenant's."""
    learns: bool = True
    """Whether the source keeps anything of sessions that may be learnt from. If not, verifiers do not send it
    the tokens that it lacks of a session that ends."""
    noun: str = "source"
    """What refusals call the source: "this source follows 256 sessions already"."""

    def __post_init__(self) -> None:
        if not 0 <= self.tops <= MAX_TOPS:
            raise InvalidRequest(f"source {self.name!r} asks for {self.tops} tops; ask for 0 to {MAX_TOPS}")

    def check(self, ids: Sequence[int], position: int, vocabulary_size: int) -> None:
        """Checks that these ids, the first of them at `position`, can be read here.

        Raises:
            NotFollowed: the session is too long, or an id is outside the source's or the target's vocabulary.
        """
        length = position + len(ids)
        if length > self.max_length:
            raise NotFollowed(f"the session has {length} ids; this {self.noun} can follow {self.max_length}")
        if not ids:
            return
        largest = max(ids)
        if largest >= self.readable_ids:
            raise NotFollowed(f"id {largest} is outside this {self.noun}'s vocabulary of {self.readable_ids}")
        if largest >= vocabulary_size:
            raise NotFollowed(f"id {largest} is outside the target's vocabulary of {vocabulary_size}")


class FollowedIds:
    """The committed ids of one session, with the hash over each of their prefixes.

    Raises:
        NotFollowed: a source of this profile cannot read the ids.
    """

    def __init__(self, ids: Sequence[int], vocabulary_size: int, profile: SourceProfile) -> None:
        profile.check(ids, 0, vocabulary_size)
        self.array = array("Q", ids)
        """The ids; to be read only."""
        self._hashes = array("Q", hashing.prefix_hashes(ids).tobytes())  # [n]: over the first n ids
        self._vocabulary_size = vocabulary_size
        self._profile = profile

    def __len__(self) -> int:
        return len(self.array)

    @property
    def prefix_hash(self) -> int:
        """Prefix hash over all committed ids."""
        return self._hashes[-1]

    def hash_at(self, length: int) -> int:
        """Prefix hash over the first `length` ids."""
        return self._hashes[length]

    def hashes_from(self, length: int) -> Sequence[int]:
        """A copy of the hashes over the first `length` ids and over each longer prefix."""
        return self._hashes[length:]

    def extend(self, position: int, ids: Sequence[int], prefix_hash: int) -> Sequence[int]:
        """Appends ids that the target has committed from `position` on, and returns those that are new.

        Args:
            prefix_hash: the target's hash over all ids up to and including these.

        Raises:
            NotFollowed: ids before these are missing, the hashes differ, or the source cannot read an id.
                Nothing was appended then.
        """
        length = len(self)
        if position > length:
            raise NotFollowed(f"ids {length} to {position - 1} are missing; follow the session again")
        fresh = ids[length - position :]
        self._profile.check(fresh, length, self._vocabulary_size)
        hashes = [self._hashes[-1]]
        for token in fresh:
            hashes.append(hashing.extend(hashes[-1], token))
        end = position + len(ids)
        own_hash = hashes[-1] if fresh else self._hashes[end]
        if own_hash != prefix_hash:
            raise NotFollowed(
                f"the hash over {end} ids is {own_hash:#018x} here and {prefix_hash:#018x} there; "
                f"follow the session again"
            )
        self.array.extend(fresh)
        self._hashes.extend(hashes[1:])
        return fresh

    def agreed_length(self, other: "FollowedIds") -> int:
        """Number of ids, from the first one on, that are the same in both."""
        most = min(len(self), len(other))
        return bisect_left(
            range(1, most + 1), True, key=lambda length: self._hashes[length] != other._hashes[length]
        )


class FollowedSession:
    """A session that the source follows. Sources put their own state into a subclass.

    Attributes:
        stream: number of the Attach stream.
        alias: the session's alias on that stream.
        key: tenant, session and choice.
        request: how the session is decoded.
        ids: its committed ids.
    """

    def __init__(self, follow: Follow, ids: FollowedIds) -> None:
        self.stream = follow.stream
        self.alias = follow.alias
        self.key = follow.key
        self.request: DecodingRequest = follow.request
        self.ids = ids

    @property
    def wants_drafts(self) -> bool:
        """Whether a drafted id can be accepted: the last one stands at limit - 1 and is the target's own."""
        return self.request.node_limit > 0 and len(self.ids) < self.request.limit - 1

    def fragment(
        self, tokens: Sequence[int], parents: Sequence[int], survival: Sequence[float], source: int = 1
    ) -> Fragment:
        """A draft that starts right after the committed ids; see `Fragment` for the fields.

        Args:
            source: which of the names in `request.sources` drafted it, from 1.
        """
        return Fragment(
            source=source,
            epoch=self.request.epoch,
            base=len(self.ids),
            prefix_hash=self.ids.prefix_hash,
            tokens=tuple(tokens),
            parents=tuple(parents),
            survival=tuple(survival),
        )
