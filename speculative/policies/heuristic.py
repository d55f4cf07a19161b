"""Hugging Face's heuristic schedule: longer after a draft that was accepted whole, shorter otherwise.

transformers calls it `num_assistant_tokens_schedule="heuristic"`.
"""

from dataclasses import replace

from speculative.policies.policy import DraftLimits, DraftPolicy, SeenProgress

_LONGER = 2
_SHORTER = 1


class LengthHeuristic(DraftPolicy):
    """Two places more after full acceptance, one fewer after a miss.

    A DraftPolicy; its value is the first depth.
    """

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._depth = int(value)

    @property
    def limits(self) -> DraftLimits:
        """The service's bounds with the present depth."""
        return replace(self.bounds, depth=min(self._depth, self.bounds.depth))

    def saw(self, progress: SeenProgress) -> None:
        """Lengthens or shortens the next draft; progress without any draft changes nothing."""
        if progress.drafted_all:
            self._depth = min(self._depth + _LONGER, self.bounds.depth)
        elif progress.missed:
            self._depth = max(1, self._depth - _SHORTER)
