"""Multi-step sampling over merged drafts, drawn independently and with replacement; the same law.

Miao and others, *SpecInfer* (arXiv 2305.09781). Draws may come from different distributions. A repeated draw
stays in the order and is judged again; without it the law changes.
"""

from dataclasses import dataclass
from typing import ClassVar

from speculative.acceptance.criterion import Chance, Promise, TargetRows, Weights
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.rejection import residual, step_by_step
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class MultiStep:
    """Tries the draws of a node in order, each by the ratio rule against what the ones before it left."""

    promise: ClassVar[Promise] = Promise.SAME_LAW
    needs_q: ClassVar[bool] = True

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted path, then a token of the target's."""

        def judge(node: int, p: Weights) -> tuple[int | None, Weights]:
            for child, law in drawn.get(node, ()):
                token = tree.tokens[child]
                if chance.below(p[token] / law.of(token)):
                    return child, p
                p = residual(p, law)
            return None, p

        return step_by_step(tree, rows, chance, judge)
