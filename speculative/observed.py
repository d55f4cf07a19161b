"""What the target said at the rows of a round, for sources that learn from it; knows nothing of the wire.

Nothing here decides a token: it is a by-product of rows that were computed anyway.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_TOPS = 32
"""The most top ids that a source may ask for."""


class TopIds(NamedTuple):
    """The target's likeliest ids at one place, likeliest first, among equals the lowest id first."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability of each id under the raw logits."""


class OffPathRow(NamedTuple):
    """What the target said after a verified node off the path, or after a scout."""

    prefix_hash: int
    """Hash of all ids up to and including the node's token."""
    last: int
    """The node's token."""
    token: int
    """The token that the target would have chosen next, noise included."""
    top_ids: tuple[int, ...]
    """The target's likeliest ids next, likeliest first."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the target said in one round of a session."""

    count: int
    """Number of top ids of each row."""
    tops: tuple[TopIds, ...] = ()
    """The target's likeliest ids at the place of each committed token."""
    off_path: tuple[OffPathRow, ...] = ()
    """One row for each verified node off the path and each scout."""

    def of_text(self, vocabulary_size: int) -> "Observed":
        """The same without rows of ids behind the vocabulary, which only a head inside the verifier knows."""
        rows = tuple(row for row in self.off_path if row.last < vocabulary_size)
        return self if len(rows) == len(self.off_path) else replace(self, off_path=rows)

    def first(self, count: int) -> "Observed":
        """The same with the tops of the first `count` committed tokens."""
        return self if len(self.tops) == count else replace(self, tops=self.tops[:count])
