"""A source's own correction of its estimates of acceptance, learnt from what became of what it sent.

A source hears which tokens were committed, so it knows which of the tokens that it sent for their places
were right. The verifier's calibration rests on the same evidence, so nothing has to be sent back. The
correction is a curve through a few points that never falls, so it keeps the order of children. Pure.
"""

from bisect import bisect_right
from typing import Final

_EDGES: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_MIDDLES: Final = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
_REFRESH: Final = 16
"""Observations after which the curve is drawn again."""
_UNSEEN: Final = 1.0
"""Weight of a bin without evidence where its neighbours fall: it gives way to those that have some."""


class SurvivalCurve:
    """Estimates against outcomes, as a curve.

    Args:
        prior: curve that corrects estimates first, and learns along; None: estimates come as they are.
        strength: weight of what comes in, in observations: where there is little evidence it stands.
        memory: about how many observations of one bin count; older ones fade.
    """

    def __init__(
        self, prior: "SurvivalCurve | None" = None, *, strength: float = 150.0, memory: float = 400.0
    ) -> None:
        self._prior = prior
        self._strength = strength
        self._keep = 1.0 - 1.0 / memory
        self._hits = [0.0] * len(_MIDDLES)
        self._tries = [0.0] * len(_MIDDLES)
        self._sums = [0.0] * len(_MIDDLES)
        self._unread = _REFRESH
        self._xs: list[float] = []
        self._ys: list[float] = []

    def saw(self, estimate: float, hit: bool) -> None:
        """Learns from a sent token whose place was committed, here and in the prior; `hit`: it was right."""
        if self._prior is not None:
            self._prior.saw(estimate, hit)
            estimate = self._prior.worth(estimate)
        kind = bisect_right(_EDGES, estimate)
        self._hits[kind] = self._hits[kind] * self._keep + hit
        self._tries[kind] = self._tries[kind] * self._keep + 1.0
        self._sums[kind] = self._sums[kind] * self._keep + estimate
        self._unread += 1

    def worth(self, estimate: float) -> float:
        """The corrected probability, within [0, 1]; it never falls as the estimate rises."""
        if self._prior is not None:
            estimate = self._prior.worth(estimate)
        if self._unread >= _REFRESH:
            self._draw()
        xs, ys = self._xs, self._ys
        at = bisect_right(xs, estimate)
        if at == len(xs):
            return ys[-1]
        low_x, low_y = (xs[at - 1], ys[at - 1]) if at else (0.0, 0.0)
        return low_y + (ys[at] - low_y) * (estimate - low_x) / (xs[at] - low_x)

    def _draw(self) -> None:
        """Draws the curve through the mean of each bin, and through 1."""
        self._unread = 0
        strength = self._strength
        xs, ys, weights = [], [], []
        for kind, middle in enumerate(_MIDDLES):
            tries = self._tries[kind]
            x = (strength * middle + self._sums[kind]) / (strength + tries)
            xs.append(x)
            ys.append((strength * x + self._hits[kind]) / (strength + tries))
            weights.append(_UNSEEN + tries)
        tries = self._tries[-1]
        xs.append(1.0)
        ys.append((strength + self._hits[-1]) / (strength + tries))
        weights.append(_UNSEEN)
        self._xs, self._ys = xs, _rising(ys, weights)


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """The values nearest to these that never fall: neighbours that fall are pooled to their mean."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, values pooled)
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            mean, heavy, pooled = pools.pop()
            value = (mean * heavy + value * weight) / (heavy + weight)
            weight += heavy
            count += pooled
        pools.append((value, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]
