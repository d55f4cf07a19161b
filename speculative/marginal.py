"""What each of several sources adds to the others: committed tokens that no better source had drafted.

Sources often draft the same node. Such a node counts for the best of its sources, so of two equal sources one
has all the gain, and the other can be left alone. Every committed path is evidence, whether the step admitted
its nodes or not. Pure; knows nothing of trees, rounds or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

_WEIGHT = 0.05
"""Weight of one round in the running means."""
_PRIOR = 0.5
"""Tokens per round that a source is taken to gain before anything is known of it."""
_NEARLY = log(1.25)
"""Sources whose tokens per round differ by less than about this factor count as equally good."""
_OFTEN_RIGHT = 0.3
"""Right tokens per round above which a source is often right. The prior falls below within ten rounds."""
_LEAST_TOKENS = 1e-3


class DraftedPlace(NamedTuple):
    """A committed position for which there were drafted nodes when the pass began."""

    drafted: tuple[int, ...]
    """Source indices of the sources that had drafted any token there."""
    right: tuple[int, ...]
    """Those of them that had drafted the committed token, in the order of their offers."""


@dataclass(slots=True)
class SourceGain:
    """Running means over the rounds of one source, in tokens and nodes per round."""

    hits: float = _PRIOR
    """Committed tokens that the source had drafted."""
    own: float = _PRIOR
    """Committed tokens that count for this source alone."""
    nodes: float = 0.0
    """Nodes that were admitted and count for this source alone."""

    def learn(self, hits: int, own: int, nodes: int) -> None:
        """Learns from a round in which the source's drafts were there."""
        self.hits += _WEIGHT * (hits - self.hits)
        self.own += _WEIGHT * (own - self.own)
        self.nodes += _WEIGHT * (nodes - self.nodes)

    @property
    def grade(self) -> int:
        """How good the source is, by steps of a quarter: small differences are chance."""
        return round(log(max(self.hits, _LEAST_TOKENS)) / _NEARLY)

    @property
    def share(self) -> float:
        """Part of the source's right tokens that count for it alone, 0 to 1."""
        return min(1.0, self.own / max(self.hits, _LEAST_TOKENS))

    @property
    def often_right(self) -> bool:
        """Whether the source drafts committed tokens in many rounds, be they its own gain or not."""
        return self.hits > _OFTEN_RIGHT

    def net(self, node_cost: float) -> float:
        """Part of the gain that is left once the rows of its admitted nodes are paid, 0 to 1.

        `node_cost` is the cost of one row, in tokens that the step would otherwise yield in that time.
        """
        if self.own <= _LEAST_TOKENS:
            return 0.0
        return min(1.0, max(0.0, 1.0 - node_cost * self.nodes / self.own))


Order = tuple[int, int, int]
"""Where a source stands when several have drafted one node; the least takes the credit."""


def credited(sources: Sequence[int], order: dict[int, Order], last: Order) -> int:
    """The source for which a node of these sources counts; of equals, the first. `sources` is not empty.

    Sources that `order` lacks stand at `last`.
    """
    if len(sources) == 1:
        return sources[0]
    return min(sources, key=lambda source: order.get(source, last))
