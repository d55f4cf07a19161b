"""Batched proposers from checkpoints of heads: their needs first, their weights once the target is loaded."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from outrider.lm.heads.config import HeadConfig, HeadNeeds
from outrider.lm.heads.published import head_class, load_head
from outrider.lm.heads.target_parts import TargetParts, TargetShape
from outrider.lm.runner import PackedLM
from verifier_service.proposers.batched import (
    BatchedProposer,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
)
from verifier_service.proposers.heads.draft import HeadGrowth, HeadSession, Logits


class HeadLimits(NamedTuple):
    """Limits of a target at which drafts end."""

    vocabulary_size: int
    max_length: int
    eos_ids: frozenset[int]

    def session(self, session: ProposedSession, growth: HeadGrowth) -> HeadSession:
        """The state of a session for which a head drafts."""
        return HeadSession(session, growth, *self)


MakeProposer = Callable[[Any, ProposerNeeds, HeadLimits], BatchedProposer]
"""Makes the proposer of a loaded head's module."""


def planned_head(config: ProposerConfig) -> tuple[HeadConfig, HeadNeeds]:
    """A proposer's head and what the head needs. Raises OutriderError for a head that does not fit."""
    head = HeadConfig.read(config.checkpoint)
    kind, shape = head_class(head), TargetShape.read(config.model)
    with head.describing():
        return head, kind.needs(head, shape)


def plan_head(config: ProposerConfig, make: MakeProposer) -> ProposerPlan:
    """The plan of a proposer that drafts with a head. Raises OutriderError for a head that does not fit."""
    head, needed = planned_head(config)
    needs = ProposerNeeds(layers=needed.reads, planes=needed.planes, tenant=config.tenant, parts=needed.parts)

    def load(target: PackedLM) -> BatchedProposer:
        # Layers that are split wait for the other ranks, which run no head.
        parts = TargetParts.of(target.model) if config.ranks == 1 else target.whole_parts
        assert parts is not None, "over several ranks a head names the layers with which it computes"
        module = load_head(head, parts)
        limits = HeadLimits(target.vocabulary_size, target.max_length, frozenset(target.eos_ids))
        return make(module, needs, limits)

    return ProposerPlan(needs, load)


def host_rows(logits: Tensor) -> Logits:
    """Logits as rows in the host's memory, float32 ``[rows, V]``."""
    found: Logits = logits.float().cpu().numpy()
    return found
