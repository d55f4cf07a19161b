"""Typical acceptance: a token passes if the target does not find it surprising; relaxed.

Cai and others, *Medusa* (arXiv 2401.10774), section 2.3.1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from speculative.acceptance.criterion import Chance, Promise, TargetRows, check_range
from speculative.acceptance.drawn import Drawn
from speculative.acceptance.path_match import Match
from speculative.acceptance.relaxed import Place, deepest_path
from speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Typical:
    """A token passes if p(x) >= min(epsilon, delta exp(-H(p))), p at the request's temperature."""

    promise: ClassVar[Promise] = Promise.RELAXED
    needs_q: ClassVar[bool] = False
    epsilon: float = 0.09
    """The threshold where the target is sure; above 0, at most 1."""
    delta: float = 0.3
    """Multiplies exp(-entropy) where the target is not; above 0, at most 1."""

    def __post_init__(self) -> None:
        check_range("typical.epsilon", self.epsilon, 0, 1, open_low=True)
        check_range("typical.delta", self.delta, 0, 1, open_low=True)

    def __call__(self, tree: TokenTree, rows: TargetRows, drawn: Drawn, chance: Chance) -> Match:
        """The deepest path of passing tokens, then the target's own token."""
        return deepest_path(tree, rows, self._passes)

    def _passes(self, place: Place) -> bool:
        found = place.logprobs[np.isfinite(place.logprobs)]
        entropy = -float(np.exp(found) @ found)
        return math.exp(place.logprobs[place.token]) >= min(self.epsilon, self.delta * math.exp(-entropy))
