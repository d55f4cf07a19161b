"""What a head is trained on: its divergence from the target, and for EAGLE the distance of its features.

Early places weigh most, since a draft's later tokens count only where the earlier ones were right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.lm.heads.eagle3 import Eagle3Head
from training.heads.divergence import DIVERGENCES
from training.heads.frozen import FrozenTarget
from training.heads.unrolled import TrainedHead, unrolled

CROSS_ENTROPY = "cross-entropy"
"""Name of the loss against the text's own next token instead of the target's distribution."""
LOSSES = (*DIVERGENCES, CROSS_ENTROPY)
"""Names that `--divergence` takes."""
STEP_WEIGHT = 0.8
"""Weight of each place relative to the place before, as in Medusa."""


@dataclass(frozen=True)
class HeadLoss:
    """The loss of one kind of head.

    Attributes:
        divergence: a name of `LOSSES`.
        depth: number of tokens ahead that training looks: Medusa's heads, or EAGLE's simulated steps.
        feature_weight: weight of SmoothL1 between estimated and true features; only for EAGLE.
        divergence_weight: weight of the divergence.
        noise: the largest noise on a component of the features that EAGLE reads, at 512 tokens (uniform).
        scored: share of the places whose divergence is computed; the LM head takes most of a step's time.
    """

    divergence: str
    depth: int
    feature_weight: float
    divergence_weight: float
    noise: float
    scored: float = 1.0

    def of_batch(
        self,
        head: TrainedHead,
        target: FrozenTarget,
        ids: torch.Tensor,
        features: torch.Tensor,
        seed: int | None,
        weights: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mean loss of rows (ids int64 [rows, length], features [rows, length, width]); a float32 scalar.

        Args:
            seed: seed of the noise and of the scored places; None: no noise, and all places are scored.
            weights: weight of each place, whose hidden states predict the token behind it, [rows, length];
                None: all weigh the same.
            read: hidden states that the head reads, [rows, length, layers, width]; None: it reads `features`.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        given = features if read is None else read
        if generator is not None and self.noise:
            given = given + self._noise(given, generator)
        drafted_ids = head.drafted_ids if isinstance(head, Eagle3Head) else None
        roots = ids.shape[1] - self.depth - 1
        chosen = self._chosen(roots, generator).to(ids.device)
        loss = torch.zeros((), device=ids.device)
        with torch.autocast(ids.device.type, torch.bfloat16):
            steps = unrolled(head, ids, given, self.depth, chosen)
            for step, (logits, estimated) in enumerate(steps, start=1):
                weight = STEP_WEIGHT ** (step - 1)
                places = chosen + step
                apart = self._apart(target, logits.float(), ids, features, places, drafted_ids)
                if weights is not None:
                    apart = apart * weights[:, places]
                loss = loss + weight * self.divergence_weight * apart.mean()
                if estimated is not None and self.feature_weight:
                    behind = slice(step, step + estimated.shape[1])
                    distance = _distance(
                        estimated, features[:, behind], None if weights is None else weights[:, behind]
                    )
                    loss = loss + weight * self.feature_weight * distance
        return loss / sum(STEP_WEIGHT**step for step in range(self.depth))

    def _apart(
        self,
        target: FrozenTarget,
        drafted: torch.Tensor,
        ids: torch.Tensor,
        features: torch.Tensor,
        places: torch.Tensor,
        drafted_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Loss of drafts [rows, places, vocabulary] of the tokens behind `places`: [rows, places].

        A head that may draft some ids only is compared among these. A place weighs what the target gives
        these ids.
        """
        if self.divergence == CROSS_ENTROPY:
            found = functional.cross_entropy(drafted.mT, ids[:, places + 1], reduction="none")
            return found.where(found.isfinite(), 0.0)  # the head cannot draft the text's token
        with torch.no_grad():
            wanted = target.parts.lm_head(features[:, places])
        if drafted_ids is None:
            return DIVERGENCES[self.divergence](wanted, drafted)
        part = wanted[..., drafted_ids]
        share = (part.logsumexp(-1) - wanted.logsumexp(-1)).exp()
        return share * DIVERGENCES[self.divergence](part, drafted[..., drafted_ids])

    def _noise(self, features: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        most = self.noise * 512 / features.shape[1]
        drawn = torch.rand(features.shape, generator=generator) * 2 - 1
        return (drawn * most).to(features)

    def _chosen(self, roots: int, generator: torch.Generator | None) -> torch.Tensor:
        """Places whose divergence is computed: int64, ascending."""
        count = max(1, round(self.scored * roots))
        if generator is None or count == roots:
            return torch.arange(roots)
        return torch.randperm(roots, generator=generator)[:count].sort().values


def _distance(estimated: torch.Tensor, true: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The mean SmoothL1 between hidden states [rows, places, width], whose places have these weights."""
    if weights is None:
        return functional.smooth_l1_loss(estimated.float(), true.float())
    apart = functional.smooth_l1_loss(estimated.float(), true.float(), reduction="none")
    return (apart.mean(-1) * weights).mean()
