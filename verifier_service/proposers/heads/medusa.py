"""Drafts with Medusa's heads: head k gives the tokens of level k, whatever the levels above drafted."""

from collections.abc import Sequence

from torch import Tensor

from outrider.lm.heads.medusa import MedusaHeads
from verifier_service.proposers.batched import ProposerConfig, ProposerNeeds, ProposerPlan
from verifier_service.proposers.heads.draft import HeadDraft, Logits
from verifier_service.proposers.heads.last_state import LastStateProposer
from verifier_service.proposers.heads.plan import HeadLimits, host_rows, plan_head


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of heads that need the output of the target's last norm, and no memory of their own."""
    return plan_head(config, MedusaProposer)


class MedusaProposer(LastStateProposer):
    """A BatchedProposer over Medusa's heads.

    Args:
        heads: the module.
        needs: as planned.
        limits: limits of the target.
    """

    def __init__(self, heads: MedusaHeads, needs: ProposerNeeds, limits: HeadLimits) -> None:
        super().__init__(len(heads), needs, limits)
        self._heads = heads

    def rows(self, index: int, hidden: Tensor, drafts: Sequence[HeadDraft]) -> Sequence[Logits]:
        """Logits of head `index`: one row for all nodes of each draft."""
        found = host_rows(self._heads.logits(index, hidden))
        return [found[at : at + 1] for at in range(len(drafts))]
