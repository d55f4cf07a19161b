"""What a source's survival estimates are worth: its measured acceptance, learnt online.

Evidence is every offered node whose parent was committed, admitted to a round or not: the committed token
says which child was right. So learning costs nothing, and a source of which nothing is admitted is still
measured. Sources' confidences are too sure of themselves as a rule (DSpark, EAGLE-2), and priors set by hand
know no text. Pure; knows nothing of trees.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

# Estimates are told apart where it matters: near 1, where a chain of them is long.
_EDGES: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_LEVELS: Final = 255
_BIN: Final = tuple(bisect_right(_EDGES, level / _LEVELS) for level in range(_LEVELS + 1))


class Judge(Protocol):
    """What estimates of acceptance given the parent are worth; sources are credit indices."""

    def worth(self, source: int, estimate: float) -> float:
        """The calibrated probability, within [0, 1]."""

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        """The parent of a node that was offered so was committed, and whether the node was next."""


class Trusting:
    """Takes estimates as they are and learns nothing. A Judge."""

    def worth(self, source: int, estimate: float) -> float:
        """See Judge."""
        return estimate

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        """See Judge."""


TRUSTING: Final = Trusting()


class Calibration:
    """Estimates against outcomes of one source.

    Args:
        prior: what is believed before there is evidence; None: the estimate itself.
        strength: of how many observations the belief counts as much.
        memory: about how many observations of one kind are remembered.
    """

    __slots__ = ("_hits", "_keep", "_prior", "_strength", "_tries")

    def __init__(
        self, prior: "Calibration | None" = None, *, strength: float = 8.0, memory: float = 1000.0
    ) -> None:
        self._prior = prior
        self._strength = strength
        self._keep = 1.0 - 1.0 / memory
        self._hits = [0.0] * (len(_EDGES) + 1)
        self._tries = [0.0] * (len(_EDGES) + 1)

    def worth(self, estimate: float) -> float:
        """The probability that a node with this estimate, within [0, 1], is accepted given its parent."""
        return self._worth(_BIN[int(estimate * _LEVELS)], estimate)

    def saw(self, estimate: float, hit: bool) -> None:
        """One outcome, passed on to the prior."""
        kind = _BIN[int(estimate * _LEVELS)]
        learning: Calibration | None = self
        while learning is not None:
            hits, tries, keep = learning._hits, learning._tries, learning._keep
            hits[kind] = hits[kind] * keep + hit
            tries[kind] = tries[kind] * keep + 1.0
            learning = learning._prior

    def _worth(self, kind: int, estimate: float) -> float:
        strength, prior = self._strength, self._prior
        believed = estimate if prior is None else prior._worth(kind, estimate)
        return (strength * believed + self._hits[kind]) / (strength + self._tries[kind])


class SessionJudge:
    """The calibrations of one session's sources, each leaning on what all sessions taught. A Judge."""

    # A session's own text soon says more about its sources than other sessions' did.
    _STRENGTH: Final = 12.0
    _MEMORY: Final = 200.0

    def __init__(self, priors: Sequence[Calibration] = ()) -> None:
        self._own: list[Calibration] = []
        self.use(priors)

    def use(self, priors: Sequence[Calibration]) -> None:
        """Sources by credit index; more may come, and those that were there keep what they learnt."""
        for prior in priors[len(self._own) :]:
            self._own.append(Calibration(prior, strength=self._STRENGTH, memory=self._MEMORY))

    def worth(self, source: int, estimate: float) -> float:
        """See Judge."""
        return self._own[source - 1].worth(estimate)

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        """See Judge."""
        self._own[source - 1].saw(estimate, hit)
