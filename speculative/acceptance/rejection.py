"""The walk that all criteria of the same law share: accept drawn children, or emit from what they leave."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from speculative.acceptance.criterion import Chance, TargetRows, Weights
from speculative.acceptance.drawn import DraftLaw, Drawn
from speculative.acceptance.path_match import Match
from speculative.tree import ROOT, TokenTree


class Judged(NamedTuple):
    """What a rule says of the draws below a node."""

    accepted: tuple[int, ...]
    """Accepted nodes, downwards; may be empty."""
    left: Weights | None
    """What the token after the last of them is chosen from, not normalised; None: the walk goes on there."""


Rule = Callable[[int, tuple[int, ...]], Judged]
"""Judges the draws below a node, given the tokens of the path down to it."""


def walk(tree: TokenTree, chance: Chance, rule: Rule) -> Match:
    """Applies the rule from the root down, until a chosen token has no node.

    Where a child that was not accepted carries the chosen token, the walk goes on below it. What hangs there
    was never looked at, and the token is the target's whatever the child. So point masses need no rule of
    their own.
    """
    node = ROOT
    path: list[int] = []
    tokens: list[int] = []
    while True:
        accepted, left = rule(node, tuple(tokens))
        path.extend(accepted)
        tokens.extend([tree.tokens[child] for child in accepted])
        node = accepted[-1] if accepted else node
        if left is None:
            continue
        token = chance.choose(left)
        tokens.append(token)
        child = tree.children(node).get(token)
        if child is None:
            return Match(tuple(path), tuple(tokens))
        path.append(child)
        node = child


def step_by_step(
    tree: TokenTree,
    rows: TargetRows,
    chance: Chance,
    judge: Callable[[int, Weights], tuple[int | None, Weights]],
) -> Match:
    """Walks with a rule that judges one node's draws at a time.

    `judge` gets the node and the target's distribution there; it returns the accepted child, or None and what
    is left to choose the token from.
    """

    def rule(node: int, path: tuple[int, ...]) -> Judged:
        child, left = judge(node, rows.probabilities(node, path))
        return Judged((), left) if child is None else Judged((child,), None)

    return walk(tree, chance, rule)


def residual(p: Weights, law: DraftLaw, factor: Any = 1) -> Weights:
    """What a rejected draw leaves: norm([p - factor q]+), or p where rounding leaves nothing."""
    left = p.copy()
    left[law.ids] = np.maximum(left[law.ids] - law.weights * factor, 0)
    total = left.sum()
    return left / total if total > 0 else p


def accept_first(tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance, lenience: Any = 1) -> Match:
    """The ratio rule with the first draw of each node, against `lenience` times its probability."""

    def judge(node: int, p: Weights) -> tuple[int | None, Weights]:
        draws = drawn.get(node)
        if not draws:
            return None, p
        child, law = draws[0]
        token = tree.tokens[child]
        if chance.below(p[token] / (law.of(token) * lenience)):
            return child, p
        return None, residual(p, law, lenience)

    return step_by_step(tree, rows, chance, judge)
