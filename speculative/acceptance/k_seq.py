"""k-SEQ: sequential selection among k independent draws of one distribution; the same law.

Sun and others, *SpecTr: Fast Speculative Decoding via Optimal Transport* (arXiv 2310.15141). Acceptance is
within 1 - 1/e of the optimum for independent draws.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from speculative.acceptance.criterion import Chance, Promise, TargetRows, Weights
from speculative.acceptance.drawn import DraftLaw, Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.rejection import step_by_step
from speculative.tree import TokenTree

_HALVINGS = 48


@dataclass(frozen=True, slots=True)
class KSeq:
    """Accepts each draw in order with min(1, p / (rho q)), with the least rho for which the law stays."""

    promise: ClassVar[Promise] = Promise.SAME_LAW
    needs_q: ClassVar[bool] = True

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The accepted path, then a token of the target's."""

        def judge(node: int, p: Weights) -> tuple[int | None, Weights]:
            draws = drawn.get(node, ())
            if not draws:
                return None, p
            law = draws[0].law
            division = divide(p, law, len(draws))
            for child, _ in draws:
                token = tree.tokens[child]
                if chance.below(p[token] / (law.of(token) * division.rho)):
                    return child, p
            return None, division.left

        return step_by_step(tree, rows, chance, judge)


class Division(NamedTuple):
    """How k draws share the target's mass."""

    rho: Any
    """Division factor, 1 to k."""
    left: Weights
    """What is left for the case that no draw is accepted, not normalised."""


def divide(p: Weights, law: DraftLaw, count: int) -> Division:
    """The division for `count` draws: the least rho, by halving, with 1 - (1 - beta)^count <= rho beta.

    Any rho that meets the inequality keeps the law, so rounding upwards costs acceptance, not exactness.
    """
    weights, mine = law.weights.astype(np.float64), p[law.ids].astype(np.float64)
    low, high = 1.0, float(count)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _valid(mine, weights, count, middle):
            high = middle
        else:
            low = middle
    kind = type(p.sum())
    while not _valid(p[law.ids], law.weights, count, kind(high)) and high < count:
        high *= 1 + 1e-12  # float64 took rho for valid by a rounding
    rho = kind(high)
    shared = np.minimum(law.weights, p[law.ids] / rho)
    beta = shared.sum()
    left = p.copy()
    if beta > 0:
        left[law.ids] = np.maximum(left[law.ids] - shared * ((1 - (1 - beta) ** count) / beta), 0)
    return Division(rho, left if left.sum() > 0 else p)


def _valid(p: Weights, weights: Weights, count: int, rho: Any) -> bool:
    beta = np.minimum(weights, p / rho).sum()
    return bool(1 - (1 - beta) ** count <= rho * beta)
