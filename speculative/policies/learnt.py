"""A learnt stop: a predictor of acceptance decides where a path ends, after SpecDec++ (arXiv 2405.19715).

SpecDec++ trains a head on the drafter's hidden states beforehand. Here the predictor is a logistic
regression over what every drafter has: its own estimate, the entropy of its distribution, the depth. No
weights ship with it. It begins as the drafter's own estimate, and each committed place teaches it, over all
sessions of the worker. A path ends where the predicted chance that all of it is accepted falls below
`1 - value`.
"""

import math
from dataclasses import replace

from speculative.policies.policy import DraftLimits, DraftPolicy, SeenProgress

_RATE = 0.02
"""Learning rate of the gradient steps."""
_MOST_LOGIT = 9.0
_Features = tuple[float, float, float, float]


class AcceptancePredictor:
    """Logistic regression of a node's acceptance given its parent, learnt online."""

    def __init__(self) -> None:
        self._weights = [1.0, 0.0, 0.0, 0.0]

    def predict(self, probability: float, depth: int, entropy: float) -> float:
        """The probability that a node is accepted given its parent; `entropy` in nats, `depth` from 1."""
        return self._of(_features(probability, depth, entropy))

    def learn(self, probability: float, depth: int, entropy: float, hit: bool) -> None:
        """One gradient step of the cross-entropy towards an outcome."""
        features = _features(probability, depth, entropy)
        error = _RATE * (hit - self._of(features))
        self._weights = [
            weight + error * feature for weight, feature in zip(self._weights, features, strict=True)
        ]

    def _of(self, features: _Features) -> float:
        logit = sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))
        return 1 / (1 + math.exp(-max(-_MOST_LOGIT, min(logit, _MOST_LOGIT))))


def _features(probability: float, depth: int, entropy: float) -> _Features:
    """The estimate's log-odds, entropy and depth in units of about 1, and 1."""
    inside = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(inside / (1 - inside)), entropy / 4, math.log(depth) / 2, 1.0


class LearntStop(DraftPolicy):
    """Drafts by predicted acceptance. A DraftPolicy; its value is the risk of a miss at which a path ends."""

    reads_entropy = True

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._predictor = learnt if isinstance(learnt, AcceptancePredictor) else AcceptancePredictor()
        self._limits = replace(bounds, floor=max(bounds.floor, 1 - value))

    @classmethod
    def learnt_anew(cls, bounds: DraftLimits) -> AcceptancePredictor:
        """A predictor that believes the source."""
        return AcceptancePredictor()

    @property
    def limits(self) -> DraftLimits:
        """The service's bounds with the floor that the risk leaves."""
        return self._limits

    def estimate(self, probability: float, depth: int, entropy: float) -> float:
        """The predicted probability, in place of the source's."""
        return self._predictor.predict(probability, depth, entropy)

    def saw(self, progress: SeenProgress) -> None:
        """Teaches the predictor every guess whose place was committed."""
        for trial in progress.trials:
            for probability, hit in trial.guesses:
                self._predictor.learn(probability, trial.depth, trial.entropy, hit)
