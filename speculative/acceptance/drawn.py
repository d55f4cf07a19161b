"""Drafts that were drawn at random, with the distributions that they were drawn from.

A drawn child is a sample of a known distribution; every other child is a point mass: its source would have
offered it whatever chance said. The order of draws is fixed before any is looked at, and repeated draws stay:
a merge that drops a draw because another draft has the same token changes the law of the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """The distribution that a draft was drawn from: few ids, all others have probability 0."""

    ids: NDArray[np.int64]
    """Distinct ids: int64[n]."""
    weights: Numbers
    """Probability of each of `ids`: [n], sum 1."""

    def of(self, token: int) -> Any:
        """The probability of a token."""
        return self.weights[self.ids == token].sum()

    def without(self, token: int) -> "DraftLaw | None":
        """The law given that `token` is not drawn; None where nothing else can be."""
        left = self.ids != token
        total = self.weights[left].sum()
        return DraftLaw(self.ids[left], self.weights[left] / total) if total > 0 else None


class Draw(NamedTuple):
    """One drawn child."""

    node: int
    """Node of the tree that carries the drawn token; several draws may share one."""
    law: DraftLaw
    """What the first draw at the parent was drawn from; see the criterion for further draws."""


Drawn = Mapping[int, tuple[Draw, ...]]
"""The draws below each node, in the order in which they were drawn; -1 stands for the last committed
token."""
