"""Block verification: one chain is judged as a whole; the same law, never fewer tokens than the ratio rule.

Sun and others, *Block Verification Accelerates Speculative Decoding* (arXiv 2403.10444, ICLR 2025).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from speculative.acceptance.criterion import Chance, Promise, TargetRows, Weights
from speculative.acceptance.drawn import DraftLaw, Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.rejection import Judged, walk
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class BlockVerification:
    """Accepts the longest beginning of the first chain that its joint ratio allows."""

    promise: ClassVar[Promise] = Promise.SAME_LAW
    needs_q: ClassVar[bool] = True

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted chain, then a token of the target's."""

        def rule(node: int, path: tuple[int, ...]) -> Judged:
            return judge_chain(tree, rows, drawn, chance, node, path)

        return walk(tree, chance, rule)


def judge_chain(
    tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance, node: int, path: tuple[int, ...]
) -> Judged:
    """The accepted beginning of the chain of first draws below `node`, and the weights of the next token."""
    p = rows.probabilities(node, path)
    ratio: Any = 1
    nodes: list[int] = []
    lasts: list[
        tuple[Any, Weights]
    ] = []  # by accepted length: probability to stop there at least, what is left
    while draws := drawn.get(node):
        child, law = draws[0]
        token = tree.tokens[child]
        left = _left(p, law, ratio)
        lasts.append((_reach(left.sum(), ratio), left if left.sum() > 0 else p))
        ratio = min(1, ratio * p[token] / law.of(token))
        nodes.append(child)
        node, path = child, (*path, token)
        p = rows.probabilities(node, path)
    for length in range(len(nodes), 0, -1):
        if chance.below(ratio if length == len(nodes) else lasts[length][0]):
            return Judged(tuple(nodes[:length]), p if length == len(nodes) else lasts[length][1])
    return Judged((), lasts[0][1] if lasts else p)


def _left(p: Weights, law: DraftLaw, ratio: Any) -> Weights:
    left: Weights = p * ratio
    left[law.ids] = np.maximum(left[law.ids] - law.weights, 0)
    return left


def _reach(mass: Any, ratio: Any) -> Any:
    below = mass + 1 - ratio
    # Nothing left at ratio 1 means p = q: the whole chain is then accepted before this length is asked for.
    return mass / below if below > 0 else 1
