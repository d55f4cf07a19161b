"""Stops where the source's distribution is too flat: AdaEDL (arXiv 2410.18351).

`1 - sqrt(kappa * entropy)` bounds from below how likely a token of a distribution is accepted. Drafting stops
where the bound falls under a threshold, which follows the acceptance of the session.
"""

import math

import numpy as np
from numpy.typing import NDArray

from speculative.policies.policy import DraftLimits, DraftPolicy, SeenProgress
from speculative.policies.threshold import FollowingThreshold

_KAPPA = 0.2


def entropy_of(logits: NDArray[np.float32]) -> float:
    """Entropy in nats of the softmax of logits, float32[width]; 0 where no logit is finite."""
    finite = logits[np.isfinite(logits)].astype(np.float64)
    if not len(finite):
        return 0.0
    shifted = finite - finite.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    return max(0.0, math.log(total) - float(weights @ shifted) / total)


class EntropyBound(DraftPolicy):
    """Drafts only where the distribution's entropy is low enough for a moving threshold.

    A DraftPolicy; its value is the first threshold.
    """

    reads_entropy = True

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._threshold = FollowingThreshold(value)

    def drafts_after(self, entropy: float) -> bool:
        """Whether the bound of this entropy reaches the present threshold."""
        return 1 - math.sqrt(_KAPPA * entropy) >= self._threshold.level

    def saw(self, progress: SeenProgress) -> None:
        """Moves the threshold."""
        self._threshold.saw(progress)
