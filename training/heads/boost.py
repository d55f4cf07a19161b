"""Collective boost-tuning (SpecInfer, arXiv 2305.09781): a second drafter learns what the first one misses.

A place of a row weighs as much as it is worth to the pair: where the first drafter is right, the pair gains
nothing if the second one is right, too. The idea is AdaBoost's, with weights in place of dropped rows, so
that the second drafter still learns ordinary text.
"""

from __future__ import annotations

import torch

from training.heads.frozen import FrozenTarget
from training.heads.small_lm import SmallLM


class FirstDrafter:
    """A drafter that is there already, as training of a second one sees it.

    Args:
        model: the first drafter.
        right: weight of a place where the first drafter has the target's likeliest token, 0 to 1; a place
            where it is wrong weighs 1.
    """

    def __init__(self, model: SmallLM, right: float) -> None:
        self.model = model.requires_grad_(False).eval()
        self._right = right

    @classmethod
    def load(cls, source: str, target: FrozenTarget, right: float) -> FirstDrafter:
        """Loads the first drafter. Raises OutriderError where it cannot draft for the target."""
        return cls(SmallLM.load(source, target), right)

    @torch.no_grad()
    def weights(self, target: FrozenTarget, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Weight of each place's prediction of the token behind it: float32 [rows, length], mean 1.

        Args:
            ids: int64 [rows, length].
            features: hidden states of the target after its last norm, [rows, length, width].
        """
        weights = torch.ones(ids.shape, device=ids.device)
        for row in range(len(ids)):  # one row at a time: logits are as wide as the vocabulary
            drafted = self.model.logits(self.model.hidden(ids[row : row + 1])).argmax(-1)
            wanted = target.parts.lm_head(features[row : row + 1]).argmax(-1)
            weights[row].masked_fill_((drafted == wanted)[0], self._right)
        return weights / weights.mean().clamp(min=1e-6)
