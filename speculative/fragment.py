"""A fragment of a draft tree as a source offers it, and what becomes of one; knows nothing of the wire."""

from dataclasses import dataclass
from typing import NamedTuple

from speculative.draft import check_nodes
from speculative.errors import MalformedDraft

MAX_SOURCE = 255


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a draft tree, as one source offers it; `tokens`, `parents`, `survival` have one entry per node.

    Raises:
        MalformedDraft: no node or more than 255, entries that do not line up, a parent that does not precede
            its child, or a number outside its range.
    """

    source: int
    """Credit index of the source, 1 to 255."""
    epoch: int
    base: int
    """Number of ids before the first node; these may be drafted ones."""
    prefix_hash: int
    """Over those ids; see `hashing`."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """-1 (ROOT) for a node that continues the base itself."""
    survival: tuple[float, ...]
    """Probability that the path from the base to this node is accepted, given that the base is."""

    def __post_init__(self) -> None:
        check_nodes(self.tokens, self.parents, self.survival)
        if not 1 <= self.source <= MAX_SOURCE:
            raise MalformedDraft(f"a draft's source is {self.source}; it must be 1 to {MAX_SOURCE}")
        if self.epoch < 0 or self.base < 0 or not 0 <= self.prefix_hash < 1 << 64:
            raise MalformedDraft(
                f"a draft's epoch {self.epoch}, base {self.base} or hash {self.prefix_hash} is out of range"
            )

    def __len__(self) -> int:
        return len(self.tokens)


class Offer(NamedTuple):
    """What became of a fragment's nodes; the counts add up to the nodes offered."""

    kept: int = 0
    """New in the pool."""
    stale: int = 0
    """Of an older epoch, off the committed path, or of a fragment of which nothing is left on it."""
    waiting: int = 0
    """Of a base that is not known yet."""
    duplicate: int = 0
    """There already: pending, committed or waiting."""
    refused: int = 0
    """Beyond a bound: the session's limit, the pool's size, or the source's share of it."""


@dataclass(slots=True)
class Totals:
    """What became of nodes over a pool's life, those that waited included."""

    kept: int = 0
    stale: int = 0
    duplicate: int = 0
    refused: int = 0
    outrun: int = 0
    """Kept, and then dropped by a commit that went another way."""

    def add(self, offer: Offer) -> None:
        """Counts what is decided; what waits is counted once it is."""
        self.kept += offer.kept
        self.stale += offer.stale
        self.duplicate += offer.duplicate
        self.refused += offer.refused
