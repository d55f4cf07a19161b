"""The ratio rule: accept a drawn token with min(1, p/q), else emit from norm([p - q]+); the same law.

Leviathan, Kalman and Matias, *Fast Inference from Transformers via Speculative Decoding* (arXiv 2211.17192);
Chen and others, *Accelerating Large Language Model Decoding with Speculative Sampling* (arXiv 2302.01318).
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.rejection import accept_first
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Ratio:
    """Accepts the first draw of each node with probability min(1, p/q)."""

    promise: ClassVar[Promise] = Promise.SAME_LAW
    needs_q: ClassVar[bool] = True

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted chain, then a token of the target's."""
        return accept_first(tree, rows, drawn, chance)
