"""The approximate criteria of blockwise parallel decoding: top-k, distance, least block; relaxed.

Stern, Shazeer and Uszkoreit, *Blockwise Parallel Decoding for Deep Autoregressive Models* (arXiv 1811.03115),
section 5.
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows, check_range
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.relaxed import Place, deepest_path, rank
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Blockwise:
    """A token passes by any of three rules; their defaults together are exact for greedy decoding."""

    promise: ClassVar[Promise] = Promise.RELAXED
    needs_q: ClassVar[bool] = False
    top_k: int = 1
    """Ids among the k likeliest pass; 1 to 1,024."""
    distance: int = 0
    """Ids at most this far from the likeliest id pass, for ids with an order such as levels; 0 to 65,536."""
    least_block: int = 1
    """The least number of tokens that a round commits, if the draft is long enough; 1 to 64."""

    def __post_init__(self) -> None:
        check_range("blockwise.top_k", self.top_k, 1, 1024)
        check_range("blockwise.distance", self.distance, 0, 65536)
        check_range("blockwise.least_block", self.least_block, 1, 64)

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The deepest path of passing tokens, then the target's own token."""
        return deepest_path(tree, rows, self._passes)

    def _passes(self, place: Place) -> bool:
        if place.depth < self.least_block or rank(place.logprobs, place.token) < self.top_k:
            return True
        return abs(place.token - int(place.logprobs.argmax())) <= self.distance
