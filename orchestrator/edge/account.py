"""What the device of one choice may send: shape, base, epoch and credits of its drafts, checked one by one.

Pure: knows nothing of streams, tenants or clocks. The caller feeds what the client was sent and what its
device sends; fragments that a verifier should see come out. A device that lies or repeats itself spends its
credits, and what is kept of a device's drafts is bounded.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.v1 import generation_pb2
from outrider.wire.codec import fragment_from_wire
from speculative.errors import MalformedDraft
from speculative.fragment import Fragment
from speculative.hashing import extend, prefix_hash
from speculative.tree import ROOT

RECENT = 512
"""Number of latest committed positions that a draft may continue; verifiers cannot use drafts for older
ones."""
MOST_NODES = 2048
"""Number of latest drafted prefixes that a further draft may continue."""


class Dropped(StrEnum):
    """Why a device's nodes do not go on to the verifier."""

    MALFORMED = "malformed"
    """The nodes cannot be a draft of this session, or came after such a draft."""
    CREDIT = "credit"
    """The device had no credits left for the nodes."""
    STALE = "stale"
    """The nodes continue ids that the session does not have (any more), or name an older epoch."""
    RATE = "rate"
    """The tenant's devices together send too fast."""
    UNPLACED = "unplaced"
    """No verifier fetched the nodes in time."""


@dataclass(frozen=True, slots=True)
class Credits:
    """Numbers of nodes that a device may send for one choice on one stream."""

    first: int
    """Nodes that a device may send before it has received a token."""
    per_token: int
    """Further nodes that a device may send for each token that it receives."""


@dataclass(slots=True)
class DeviceCounts:
    """Counts of the nodes that a device sent for one choice: nodes sent on, and nodes dropped before the
    verifier."""

    windows: int = 0
    nodes: int = 0
    forwarded: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)
    """Number of dropped nodes by reason."""

    def to_wire(self) -> generation_pb2.DeviceUsage:
        """The counts as the message for the client."""
        return generation_pb2.DeviceUsage(
            windows=self.windows,
            nodes=self.nodes,
            forwarded=self.forwarded,
            dropped={str(reason): count for reason, count in self.dropped.items()},
        )


class DraftAccount:
    """Checks the drafts of one choice's device against what its client was sent.

    Args:
        ids: ids of the prompt and of the part of the answer that the client has.
        vocabulary_size: width of the target's logits; drafted ids are below it.
        dropped: called with the reason and the number of dropped nodes.
    """

    def __init__(
        self,
        ids: Sequence[int],
        vocabulary_size: int,
        credits: Credits,
        dropped: Callable[[Dropped, int], None] = lambda why, count: None,
    ) -> None:
        self.counts = DeviceCounts()
        self._dropped = dropped
        self._vocabulary_size = vocabulary_size
        self._credits = credits
        self._left = credits.first
        self._length = len(ids)
        self._hash = prefix_hash(ids)
        self._committed = {self._hash: self._length}
        """Lengths of the latest committed prefixes, by their hashes."""
        self._drafted: dict[int, int] = {}
        """Lengths of the latest prefixes that end in a drafted id, by their hashes."""

    def committed(self, ids: Sequence[int]) -> int:
        """Adds ids that are sent to the client; returns the prefix hash over all ids so far."""
        for token in ids:
            self._length += 1
            self._hash = extend(self._hash, token)
            self._committed[self._hash] = self._length
        while len(self._committed) > RECENT:
            del self._committed[next(iter(self._committed))]
        self._left += self._credits.per_token * len(ids)
        return self._hash

    def take(self, drafts: generation_pb2.DeviceDrafts, epoch: int, *, stale: bool) -> Fragment | None:
        """The fragment to send on; None where the nodes were dropped and counted.

        Args:
            epoch: the session's present epoch.
            stale: whether the device drafted under an older epoch.

        Raises:
            MalformedDraft: a working device would never send such a draft.
        """
        count = len(drafts.ids)
        self.counts.windows += 1
        self.counts.nodes += count
        fragment = self._checked(drafts, epoch)
        if count > self._left:
            self.drop(count, Dropped.CREDIT)
            return None
        self._left -= count
        if stale or not self._is_known(fragment):
            self.drop(count, Dropped.STALE)
            return None
        self._remember(fragment)
        return fragment

    def refuse(self, count: int) -> None:
        """Counts nodes of a device whose drafts are no longer taken."""
        self.counts.windows += 1
        self.counts.nodes += count
        self.drop(count, Dropped.MALFORMED)

    def unplaced(self, count: int) -> None:
        """Counts valid nodes that no verifier fetched in time."""
        self.counts.forwarded -= count
        self.drop(count, Dropped.UNPLACED)

    def drop(self, count: int, why: Dropped) -> None:
        """Counts nodes that are not sent on to the verifier."""
        self.counts.dropped[why] += count
        self._dropped(why, count)

    def _checked(self, drafts: generation_pb2.DeviceDrafts, epoch: int) -> Fragment:
        try:
            fragment = fragment_from_wire(drafts, source=1, epoch=epoch)
            if (largest := max(fragment.tokens)) >= self._vocabulary_size:
                raise MalformedDraft(f"a draft holds id {largest}; ids are below {self._vocabulary_size}")
        except MalformedDraft:
            self.drop(len(drafts.ids), Dropped.MALFORMED)
            raise
        return fragment

    def _is_known(self, fragment: Fragment) -> bool:
        """Whether the fragment continues committed ids, or ids that the device drafted behind them."""
        known = self._committed if fragment.base <= self._length else self._drafted
        return known.get(fragment.prefix_hash) == fragment.base

    def _remember(self, fragment: Fragment) -> None:
        hashes: list[int] = []
        depths: list[int] = []
        for token, parent in zip(fragment.tokens, fragment.parents, strict=True):
            before = fragment.prefix_hash if parent == ROOT else hashes[parent]
            depth = 1 if parent == ROOT else depths[parent] + 1
            hashes.append(extend(before, token))
            depths.append(depth)
            self._drafted[hashes[-1]] = fragment.base + depth
        while len(self._drafted) > MOST_NODES:
            del self._drafted[next(iter(self._drafted))]
