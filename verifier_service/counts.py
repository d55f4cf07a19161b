"""What sources did, counted by source name. One thread at a time writes an instance; any may read it.

Pure: knows nothing of metrics or links.
"""

from dataclasses import dataclass, field, fields

from speculative.fragment import Offer


@dataclass(slots=True)
class SourceCounts:
    """Of one source name, since the worker started."""

    offered: int = 0
    """Nodes offered."""
    kept: int = 0
    """Of them, new in their session's pool when they came."""
    stale: int = 0
    """Nodes off the committed path, of an older epoch, or of a session that ended."""
    waiting: int = 0
    """Nodes whose base was not known when they came."""
    duplicate: int = 0
    """Nodes that were there already."""
    refused: int = 0
    """Nodes beyond a bound of their session's pool."""
    admitted: int = 0
    """Nodes that the target computed."""
    accepted: int = 0
    """Nodes delivered as tokens."""
    flooded: int = 0
    """Drafts dropped unread because too many came at once."""
    malformed: int = 0
    """Drafts that no correct source sends."""
    muted: int = 0
    """Sessions that no longer listen to the source, after something malformed."""
    unfollowed: int = 0
    """Sessions that the source refused to follow."""

    def offer(self, nodes: int, offer: Offer) -> None:
        """So many nodes came together, and this became of them."""
        self.offered += nodes
        self.kept += offer.kept
        if offer.kept < nodes:
            self.stale += offer.stale
            self.waiting += offer.waiting
            self.duplicate += offer.duplicate
            self.refused += offer.refused

    def plus(self, other: "SourceCounts") -> "SourceCounts":
        """The sum of two."""
        return SourceCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


OTHER = "other"
MOST_NAMES = 64


class CountsByName(dict[str, SourceCounts]):
    """Source name to its counts, made when asked for.

    Clients name sources: what comes after so many names is counted together, as OTHER.
    """

    def __missing__(self, name: str) -> SourceCounts:
        if len(self) >= MOST_NAMES and name != OTHER:
            return self[OTHER]
        counts = self[name] = SourceCounts()
        return counts


@dataclass(slots=True)
class EngineTotals:
    """What the engine did since it started."""

    steps: int = 0
    """Forward calls, one per step."""
    rows: int = 0
    """Input tokens of those calls."""
    rounds: int = 0
    committed: int = 0
    preempted: int = 0
    """Sessions that gave up their keys and values to older ones, to be computed again."""
    waits: int = 0
    """Steps that waited for a draft."""
    failed_sessions: int = 0
    drafted_rounds: int = 0
    """Rounds that brought at least one drafted node."""
    accepted_at: list[int] = field(default_factory=list)
    """How many rounds accepted a first drafted token, a second, and so on."""

    def accepted(self, count: int) -> None:
        """A round accepted so many drafted tokens."""
        while len(self.accepted_at) < count:
            self.accepted_at.append(0)
        for place in range(count):
            self.accepted_at[place] += 1
