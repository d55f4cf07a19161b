"""Self-Speculative Decoding's stop (arXiv 2309.08168): a confidence threshold that follows acceptance."""

from speculative.policies.policy import DraftLimits, DraftPoint, DraftPolicy, SeenProgress
from speculative.policies.threshold import FollowingThreshold


class MovingThreshold(DraftPolicy):
    """Goes on below nodes that reach a moving threshold. A DraftPolicy; its value is the first threshold."""

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._threshold = FollowingThreshold(value)

    def goes_on(self, point: DraftPoint) -> bool:
        """Whether the node itself, given its parent, reaches the present threshold."""
        return point.probability >= self._threshold.level

    def saw(self, progress: SeenProgress) -> None:
        """Moves the threshold."""
        self._threshold.saw(progress)
