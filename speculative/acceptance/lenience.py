"""Lenience: the ratio rule against a draft probability made smaller; relaxed.

No token becomes more than 1/l times as likely as under the target. Leviathan, Kalman and Matias, *Fast
Inference from Transformers via Speculative Decoding*, appendix A.5 (arXiv 2211.17192).
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows, check_range
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.rejection import accept_first
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Lenience:
    """Accepts the first draw of each node with probability min(1, p / (l q)); l = 1 is the ratio rule."""

    promise: ClassVar[Promise] = Promise.RELAXED
    needs_q: ClassVar[bool] = True
    factor: float = 0.7
    """l: multiplies the draft's probability; above 0, at most 1."""

    def __post_init__(self) -> None:
        check_range("lenience.factor", self.factor, 0, 1, open_low=True)

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted chain, then a token from norm([p - l q]+), or from p at the draft's end."""
        return accept_first(tree, rows, drawn, chance, self.factor)
