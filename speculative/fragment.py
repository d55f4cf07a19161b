"""A fragment of a session's draft tree, as a source offers it, and its fate; knows nothing of the wire."""

from dataclasses import dataclass
from typing import NamedTuple

from speculative.draft import check_nodes
from speculative.errors import MalformedDraft

MAX_SOURCE = 255


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a session's draft tree, as one source offers it: a draft and the prefix that it continues.

    The prefix (the fragment's base) may end in drafted ids. `tokens`, `parents` and `survival` have one entry
    per node.

    Raises:
        MalformedDraft: nodes that are no draft (see `speculative.draft.check_nodes`), or a number outside its
            range.
    """

    source: int
    """Source index, 1 to 255: k is the session's source number k, counted from 1."""
    epoch: int
    """Epoch of the session for which the source drafted."""
    base: int
    """Number of ids before the first node; the last of them may be drafted ones."""
    prefix_hash: int
    """Hash of the ids before the first node; see `hashing`."""
    tokens: tuple[int, ...]
    """Token id of each node."""
    parents: tuple[int, ...]
    """Node index of each node's parent; -1 (ROOT) for a node that continues the base."""
    survival: tuple[float, ...]
    """Probability that the path from the base to the node is accepted, given that the base is."""

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
    """Numbers of a fragment's nodes by what the pool did with them; they add up to the nodes offered."""

    kept: int = 0
    """Nodes that are new in the pool."""
    stale: int = 0
    """Nodes of an older epoch or off the committed path."""
    unanchored: int = 0
    """Nodes whose base is not known yet."""
    duplicate: int = 0
    """Nodes that the pool has already: as a draft, as committed ids, or unanchored."""
    refused: int = 0
    """Nodes beyond a bound: the session's token limit, the pool's size, or the source's share of the pool."""


@dataclass(slots=True)
class OfferTotals:
    """Numbers of nodes over a pool's life by what the pool did with them; fields as in `Offer`."""

    kept: int = 0
    stale: int = 0
    duplicate: int = 0
    refused: int = 0
    outrun: int = 0
    """Kept nodes that a commit of other tokens dropped."""

    def add(self, offer: Offer) -> None:
        """Adds an offer's nodes, except unanchored ones, which are counted once their base is known."""
        self.kept += offer.kept
        self.stale += offer.stale
        self.duplicate += offer.duplicate
        self.refused += offer.refused
