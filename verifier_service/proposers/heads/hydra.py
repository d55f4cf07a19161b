"""Drafts with Hydra's heads: head k reads the path of each node that the draft grows from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.lm.heads.hydra import HydraHeads
from verifier_service.proposers.batched import ProposerConfig, ProposerNeeds, ProposerPlan
from verifier_service.proposers.heads.draft import HeadDraft, Logits
from verifier_service.proposers.heads.last_state import LastStateProposer
from verifier_service.proposers.heads.plan import HeadLimits, host_rows, plan_head


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of heads that need the output of the target's last norm, and no memory of their own."""
    return plan_head(config, HydraProposer)


class HydraProposer(LastStateProposer):
    """A BatchedProposer over Hydra's heads.

    Args:
        heads: the module.
        needs: as planned.
        limits: limits of the target.
    """

    def __init__(self, heads: HydraHeads, needs: ProposerNeeds, limits: HeadLimits) -> None:
        super().__init__(len(heads), needs, limits)
        self._heads = heads

    def rows(self, index: int, hidden: Tensor, drafts: Sequence[HeadDraft]) -> Sequence[Sequence[Logits]]:
        """Logits of head `index`: one row per node of each draft's frontier."""
        counts = [len(draft.frontier) for draft in drafts]
        paths = torch.tensor(
            [path for draft in drafts for path in draft.frontier_paths], device=hidden.device
        )
        hidden = hidden.repeat_interleave(torch.tensor(counts, device=hidden.device), 0)
        found = iter(host_rows(self._heads.logits(index, hidden, paths)))
        return [[next(found) for _ in range(count)] for count in counts]
