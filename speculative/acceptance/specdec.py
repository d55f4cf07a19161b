"""SpecDec's verification: a token passes if it is among the target's best and not far behind; relaxed.

Xia and others, *Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation*
(arXiv 2203.16487).
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows, check_range
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.relaxed import Place, deepest_path, rank
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class SpecDec:
    """A token passes if it is among the `beta` likeliest and within `gap` of the likeliest.

    beta = 1 is exact for greedy decoding.
    """

    promise: ClassVar[Promise] = Promise.RELAXED
    needs_q: ClassVar[bool] = False
    beta: int = 3
    """Number of likeliest ids that pass; 1 to 1,024."""
    gap: float = 1.0
    """The most by which log p may stay behind that of the likeliest id; 0 to 100."""

    def __post_init__(self) -> None:
        check_range("specdec.beta", self.beta, 1, 1024)
        check_range("specdec.gap", self.gap, 0, 100)

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The deepest path of passing tokens, then the target's own token."""
        return deepest_path(tree, rows, self._passes)

    def _passes(self, place: Place) -> bool:
        behind = float(place.logprobs.max() - place.logprobs[place.token])
        return behind <= self.gap and rank(place.logprobs, place.token) < self.beta
