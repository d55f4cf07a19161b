"""Stops a path behind a token that the source doubts: transformers' `assistant_confidence_threshold`."""

from speculative.policies.policy import DraftPoint, DraftPolicy


class ConfidenceThreshold(DraftPolicy):
    """Goes on below nodes of a least probability. A DraftPolicy; its value is that probability."""

    def goes_on(self, point: DraftPoint) -> bool:
        """Whether the node itself, given its parent, is likely enough."""
        return point.probability >= self.value
