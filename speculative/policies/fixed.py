"""Drafts a fixed number of places ahead, as Speculative Decoding does (arXiv 2211.17192)."""

from dataclasses import replace

from speculative.policies.policy import DraftLimits, DraftPolicy


class FixedDepth(DraftPolicy):
    """Drafts to the same depth in every round. A DraftPolicy; its value is the depth."""

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        super().__init__(bounds, value)
        self._limits = replace(bounds, depth=min(int(value), bounds.depth))

    @property
    def limits(self) -> DraftLimits:
        """The service's bounds with the fixed depth."""
        return self._limits
