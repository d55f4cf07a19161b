"""Recursive rejection of siblings drawn without replacement; the same law.

The sampling of EAGLE (Li and others, arXiv 2401.15077) and Sequoia (Chen and others, arXiv 2402.12374): draw
j is from q without the draws before it. Not for children chosen as the k likeliest: those are point masses.
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows, Weights
from speculative.acceptance.drawn import DraftLaw, Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.rejection import residual, step_by_step
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """Tries the distinct draws of a node in order, each against q without the draws before it."""

    promise: ClassVar[Promise] = Promise.SAME_LAW
    needs_q: ClassVar[bool] = True

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted path, then a token of the target's."""

        def judge(node: int, p: Weights) -> tuple[int | None, Weights]:
            draws = drawn.get(node, ())
            law: DraftLaw | None = draws[0].law if draws else None
            for child, _ in draws:
                if law is None:
                    break
                token = tree.tokens[child]
                if chance.below(p[token] / law.of(token)):
                    return child, p
                p, law = residual(p, law), law.without(token)
            return None, p

        return step_by_step(tree, rows, chance, judge)
