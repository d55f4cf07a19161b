"""The default: best first by survival, no deeper than places are reached by the session's own acceptance.

A place at depth d is reached if every place before it was drafted rightly. Acceptance is measured for each
depth: what survives the first places is often easy text, so acceptance need not fall with depth. A
path ends where a place is reached less often than `value`.
"""

from dataclasses import replace

from speculative.policies.policy import DraftLimits, DraftPolicy, SeenProgress

_BELIEF = 0.9
"""Acceptance that is believed of the first depth; a further one leans on the depth before it."""
_STRENGTH = 6.0
"""Weight of what a depth leans on, in trials."""
_KEEP = 0.97
"""Factor by which earlier trials of a depth fade with each further one."""


class SurvivalDepth(DraftPolicy):
    """Goes as deep as the session still reaches, by its measured acceptance of each depth.

    A DraftPolicy; its value is the least chance that a place is reached.
    """

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._hits = [0.0] * bounds.depth
        self._tries = [0.0] * bounds.depth
        self._depth = self._reached()

    @property
    def limits(self) -> DraftLimits:
        """The service's bounds with the present depth."""
        return replace(self.bounds, depth=self._depth)

    def saw(self, progress: SeenProgress) -> None:
        """Counts each place by its depth."""
        for trial in progress.trials:
            at = min(trial.depth, self.bounds.depth) - 1
            self._hits[at] = self._hits[at] * _KEEP + trial.hit
            self._tries[at] = self._tries[at] * _KEEP + 1
        if progress.trials:
            self._depth = self._reached()

    def _reached(self) -> int:
        reach, accepted = 1.0, _BELIEF
        for depth, (hits, tries) in enumerate(zip(self._hits, self._tries, strict=True)):
            accepted = (hits + _STRENGTH * accepted) / (tries + _STRENGTH)
            reach *= accepted
            if reach < self.value:
                return max(1, depth)
        return self.bounds.depth
