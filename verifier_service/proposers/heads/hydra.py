"""Drafts with Hydra's heads: head k reads the path of each node that the draft grows from.

The keys and values of a prefix layer lie in planes of the target's pool, those of position i in slot i.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.lm.heads.hydra import HydraHeads
from outrider.lm.heads.layer import attend
from outrider.lm.kv.pool import Run
from verifier_service.proposers.batched import (
    DraftAsk,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
    SeenPass,
)
from verifier_service.proposers.heads.draft import HeadDraft, Logits
from verifier_service.proposers.heads.last_state import LastStateProposer
from verifier_service.proposers.heads.plan import HeadLimits, host_rows, plan_head
from verifier_service.proposers.planes.proposer_planes import ProposerPlanes


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of heads that need the output of the target's last norm, and planes for a prefix layer."""
    return plan_head(config, _proposer)


def _proposer(heads: HydraHeads, needs: ProposerNeeds, limits: HeadLimits) -> "HydraProposer":
    kind = HydraProposer if heads.prefix_embeding_layer is None else PrefixedHydraProposer
    return kind(heads, needs, limits)


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

    def rows(self, index: int, hidden: Tensor, drafts: Sequence[HeadDraft]) -> Sequence[Logits]:
        """Logits of head `index`: one row per node of each draft's frontier."""
        counts = [len(draft.frontier) for draft in drafts]
        paths = torch.tensor(
            [path for draft in drafts for path in draft.frontier_paths], device=hidden.device
        )
        hidden = hidden.repeat_interleave(torch.tensor(counts, device=hidden.device), 0)
        found = host_rows(self._heads.logits(index, hidden, paths))
        return np.split(found, np.cumsum(counts)[:-1])


class PrefixedHydraProposer(HydraProposer):
    """A BatchedProposer over Hydra's heads with a prefix layer (Hydra++).

    Args:
        heads: the module.
        needs: as planned.
        limits: limits of the target.
    """

    def __init__(self, heads: HydraHeads, needs: ProposerNeeds, limits: HeadLimits) -> None:
        super().__init__(heads, needs, limits)
        assert heads.prefix_embeding_layer is not None, "such heads have one"
        self._prefix = heads.prefix_embeding_layer
        self._planes: dict[int, ProposerPlanes] = {}
        """The proposer's planes, by handle; the same for all sessions."""

    def open(self, session: ProposedSession) -> None:
        """Begins a session; the planes already have the keys and values of its cached tokens."""
        super().open(session)
        assert session.planes is not None
        self._planes[session.handle] = session.planes

    def close(self, handle: int) -> None:
        """Forgets the session; its slots belong to the pool."""
        super().close(handle)
        self._planes.pop(handle, None)

    @torch.inference_mode()
    def saw(self, seen: SeenPass) -> None:
        """Writes the keys and values of all positions that the pass committed."""
        assert seen.features is not None
        rows: list[int] = []
        positions: list[int] = []
        runs: list[Run] = []
        for shown in seen.rounds:
            rows += shown.rows
            positions += range(shown.first, shown.first + len(shown.rows))
            runs += shown.runs
        if rows:
            there = torch.tensor(positions, device=seen.features.device)
            written = self._prefix.keys_values(seen.features[0, rows], there)
            self._planes[seen.rounds[0].handle].write(runs, written)

    def can_draft(self, handle: int) -> bool:
        """True: an ask brings the hidden state that the draft begins with."""
        return True

    def hidden(self, asks: Sequence[DraftAsk]) -> Tensor:
        """What the prefix layer makes of each session's last hidden state, ``[asks, width]``."""
        return torch.cat([self._prefixed(ask) for ask in asks])

    def _prefixed(self, ask: DraftAsk) -> Tensor:
        assert ask.before is not None
        hidden = ask.before[:1].to(self._prefix.norm.weight.dtype)
        last = sum(high - low for low, high in ask.runs) - 1
        queries = self._prefix.queries(hidden, torch.tensor([last], device=hidden.device))
        keys, values = (plane.to(hidden.dtype) for plane in self._planes[ask.handle].read(ask.runs))
        return self._prefix.finish(hidden, attend(queries[None], keys[None], values[None])[0])
