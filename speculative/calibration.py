"""Calibration of a source's survival estimates by its measured acceptance, learnt online.

Evidence is every offered node whose parent was committed, whether the node was admitted to a round or not:
the committed token says which child was right. So learning costs nothing, and a source none of whose nodes
are admitted is still measured, by those of its drafts that are offered. Sources are overconfident as a rule
(DSpark, EAGLE-2), and priors set by hand know no text. Pure; knows nothing of trees.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

# Bins are narrow where precision matters: near 1, where chains are long.
_EDGES: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_LEVELS: Final = 255
_BIN: Final = tuple(bisect_right(_EDGES, level / _LEVELS) for level in range(_LEVELS + 1))


class Estimated(Protocol):
    """A drafted node, as far as calibration needs one."""

    @property
    def estimates(self) -> Mapping[int, float]:
        """Each source's estimate of acceptance given the parent, by source index."""


class Calibrator(Protocol):
    """Calibrates estimates of a node's acceptance given its parent; `source` is a source index."""

    def worth(self, source: int, estimate: float) -> float:
        """The calibrated probability of acceptance, within [0, 1]."""

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        """Learns from one node whose parent was committed; `hit`: the node's token was committed next."""

    def followed(self, children: Mapping[int, Estimated], token: int) -> None:
        """Learns from all drafted children of a committed id, by their tokens; `token` was committed next."""


class Uncalibrated:
    """Returns estimates unchanged and learns nothing. A Calibrator."""

    def worth(self, source: int, estimate: float) -> float:
        """The estimate, unchanged."""
        return estimate

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        """Learns nothing."""

    def followed(self, children: Mapping[int, Estimated], token: int) -> None:
        """Learns nothing."""


UNCALIBRATED: Final = Uncalibrated()


class Evidence(NamedTuple):
    """What one calibration has recorded, by bin; the lists change as nodes are recorded."""

    hits: list[float]
    tries: list[float]
    keep: float
    """Factor by which earlier nodes of a bin fade with each further one."""
    strength: float
    """Weight of what the calibration leans on, in observations."""


class Calibration:
    """Estimates against outcomes of one source.

    Args:
        prior: calibration to lean on before there is evidence; None: the estimate itself.
        strength: weight of the prior, in observations.
        memory: about how many observations of one bin count; older ones fade.
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
        """Calibrated probability that a node is accepted given its parent; `estimate` is within [0, 1]."""
        return self._worth(_BIN[int(estimate * _LEVELS)], estimate)

    def saw(self, estimate: float, hit: bool) -> None:
        """Records the outcome of one node, here and in every prior."""
        kind = _BIN[int(estimate * _LEVELS)]
        for hits, tries, keep, _ in self.evidence():
            hits[kind] = hits[kind] * keep + hit
            tries[kind] = tries[kind] * keep + 1.0

    def evidence(self) -> tuple[Evidence, ...]:
        """What is recorded in every prior, the first one first, and here."""
        above = () if self._prior is None else self._prior.evidence()
        return (*above, Evidence(self._hits, self._tries, self._keep, self._strength))

    def _worth(self, kind: int, estimate: float) -> float:
        strength, prior = self._strength, self._prior
        believed = estimate if prior is None else prior._worth(kind, estimate)
        return (strength * believed + self._hits[kind]) / (strength + self._tries[kind])


class SessionCalibrator:
    """The calibrations of one session's sources, each with a prior learnt from all sessions. A Calibrator.

    What `followed` hands over is recorded when somebody asks for a worth, or by `learn`. Drafts come while
    the target computes, so the recording is no part of the time between two passes.
    """

    # A session's own text soon says more about its sources than the texts of other sessions did.
    _STRENGTH: Final = 12.0
    _MEMORY: Final = 200.0

    def __init__(self, priors: Sequence[Calibration] = ()) -> None:
        self._evidence: list[tuple[Evidence, ...]] = []
        """Evidence of each source, by source index less 1."""
        self._followed: list[tuple[Mapping[int, Estimated], int]] = []
        """Drafted children and the token that was committed in their place, not recorded yet."""
        self.use(priors)

    def use(self, priors: Sequence[Calibration]) -> None:
        """Sets the sources' priors in order of source index; sources already known keep their evidence."""
        for prior in priors[len(self._evidence) :]:
            own = Calibration(prior, strength=self._STRENGTH, memory=self._MEMORY)
            self._evidence.append(own.evidence())

    def worth(self, source: int, estimate: float) -> float:
        """The probability of acceptance, calibrated by what this source's nodes were worth."""
        if self._followed:
            self.learn()
        kind, believed = _BIN[int(estimate * _LEVELS)], estimate
        # As `Calibration.worth`, without a call for each prior: every drafted node asks.
        for hits, tries, _, strength in self._evidence[source - 1]:
            believed = (strength * believed + hits[kind]) / (strength + tries[kind])
        return believed

    def saw(self, source: int, estimate: float, hit: bool) -> None:
        """Learns from one of the source's nodes; `hit`: the node's token was committed next."""
        if self._followed:
            self.learn()
        kind = _BIN[int(estimate * _LEVELS)]
        for hits, tries, keep, _ in self._evidence[source - 1]:
            hits[kind] = hits[kind] * keep + hit
            tries[kind] = tries[kind] * keep + 1.0

    def followed(self, children: Mapping[int, Estimated], token: int) -> None:
        """Learns from all drafted children of a committed id, by their tokens; `token` was committed next.

        The children and their estimates must not change afterwards.
        """
        self._followed.append((children, token))

    def learn(self) -> None:
        """Records what `followed` has handed over; to be called at the session's end."""
        followed, self._followed = self._followed, []
        evidence = self._evidence
        for children, token in followed:
            for drafted, child in children.items():
                for source, estimate in child.estimates.items():
                    kind = _BIN[int(estimate * _LEVELS)]
                    for hits, tries, keep, _ in evidence[source - 1]:
                        hits[kind] = hits[kind] * keep + (drafted == token)
                        tries[kind] = tries[kind] * keep + 1.0
