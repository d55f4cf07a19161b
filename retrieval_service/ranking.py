"""How likely the target is to take each continuation that a memory found, if the memory is right.

A corpus says how often each token followed; the target takes the argmax of its processed log-probability plus
noise, and the noise at a position is the same on both sides. So at temperature > 0 children are ranked by
log(count share) + the session's noise, and greedily by count share. How likely is the best of them?

- Greedy decoding takes the likeliest token, so that shares are sharpened.
- With noise, what was not seen holds the rest of the probability, r, which shrinks as more was seen; its
  largest score is log(r) plus one more Gumbel number, which nobody knows here. A token of score s beats it
  with probability exp(-r e^-s). Among what was seen the larger score is the likelier winner.

How likely a memory is to be right is learnt (`trust.py`). Pure, deterministic.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speculative.noise import gumbel_at


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Bounds of drafts, and constants that turn counts into probabilities."""

    nodes: int = 48
    """Most nodes of one draft."""
    depth: int = 16
    """Longest path from the last committed token to a leaf, in tokens."""
    floor: float = 0.02
    """Survival below which a node is not sent."""
    sharpness: float = 2.0
    """Greedy: the power of the count shares by which the likeliest child stands out."""
    softness: float = 1.0
    """With noise: how far the counts stray from the target's log-probabilities, in nats."""
    unseen: float = 0.2
    """With noise: the weight of all tokens that were never seen, in occurrences."""


class Noise:
    """A session's noise for some tokens, drawn at once.

    Args:
        position: absolute, of the token behind the last committed one.
        wanted: tokens, each with its depth below that position, from 0.
    """

    def __init__(self, seed: int, position: int, wanted: Iterable[tuple[int, int]]) -> None:
        pairs = list(dict.fromkeys(wanted))
        drawn = gumbel_at(seed, [position + depth for depth, _ in pairs], [token for _, token in pairs])
        self._drawn = dict(zip(pairs, drawn.tolist(), strict=True))

    def at(self, depth: int, tokens: Sequence[int]) -> list[float]:
        """The noise of these tokens at one depth."""
        return [self._drawn[depth, token] for token in tokens]


def chances(
    shares: Sequence[float], occurrences: int, noise: Sequence[float] | None, shape: DraftShape
) -> list[float]:
    """The probability of each sibling to be the target's token; the rest is for all other tokens.

    Args:
        shares: parts of the `occurrences` in which each sibling followed.
        noise: of the siblings; None: greedy decoding.
    """
    if noise is None:
        return _greedily(shares, shape.sharpness)
    return _with_noise(shares, occurrences, noise, shape)


def _greedily(shares: Sequence[float], sharpness: float) -> list[float]:
    weights = [share**sharpness for share in shares]
    total = sum(weights) + max(0.0, 1.0 - sum(shares)) ** sharpness
    return [weight / total for weight in weights]


def _with_noise(
    shares: Sequence[float], occurrences: int, noise: Sequence[float], shape: DraftShape
) -> list[float]:
    """Chances to win against the siblings, and against unseen tokens of unknown noise."""
    seen = occurrences / (occurrences + shape.unseen)
    scores = [math.log(seen * share) + drawn for share, drawn in zip(shares, noise, strict=True)]
    best = max(scores)
    weights = [math.exp((score - best) / shape.softness) for score in scores]
    sum_of_weights, rest = sum(weights), 1.0 - seen * sum(shares)
    return [
        weight / sum_of_weights * math.exp(-rest * math.exp(min(-score, 50.0)))
        for weight, score in zip(weights, scores, strict=True)
    ]
