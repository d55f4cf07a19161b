"""Drafts with a head of one decoder layer: EAGLE's, with EAGLE-2's tree, EAGLE-3's, and MTP modules.

The pairs of committed tokens lie in planes of the target's pool as keys and values (`proposers/planes/`).
Slot 0 has no pair, since no hidden state precedes it. The pairs of drafted tokens live as long as the draft.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.lm.compiled.head_builder import HeadBuilder
from outrider.lm.heads.pair_head import PairHead
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerConfig,
    ProposerNeeds,
    ProposerPlan,
    SeenPass,
)
from verifier_service.proposers.heads.compiled_pairs import CompiledPairs
from verifier_service.proposers.heads.draft import HeadSession
from verifier_service.proposers.heads.eager_pairs import EagerPairs
from verifier_service.proposers.heads.pair_passes import GROWTH, PairPasses
from verifier_service.proposers.heads.plan import HeadLimits, plan_head


def plan(config: ProposerConfig) -> ProposerPlan:
    """The plan of a head with two planes, for the keys and the values of its layer."""

    def make(head: PairHead, needs: ProposerNeeds, limits: HeadLimits) -> EagleProposer:
        if config.passes == "eager":
            return EagleProposer(head, needs, limits)
        builder = HeadBuilder(head, limits.vocabulary_size, config.cache_dir)
        builder.start()
        if config.passes == "compiled":
            builder.wait()
        proposer = EagleProposer(head, needs, limits, builder)
        weakref.finalize(proposer, builder.close)  # ends a compiler that still runs when the verifier ends
        return proposer

    return plan_head(config, make)


class EagleProposer:
    """A BatchedProposer over a head of one decoder layer.

    Args:
        head: the module.
        needs: as planned.
        limits: limits of the target.
        builder: has the head's passes compiled; None: they stay eager.
    """

    def __init__(
        self, head: PairHead, needs: ProposerNeeds, limits: HeadLimits, builder: HeadBuilder | None = None
    ) -> None:
        self.needs = needs
        self._limits = limits
        self._sessions: dict[int, HeadSession] = {}
        self._passes: PairPasses[Any] = EagerPairs(head)
        self._builder = builder

    def open(self, session: ProposedSession) -> None:
        """Begins a session; the planes already have the pairs of its cached tokens."""
        self._sessions[session.handle] = self._limits.session(session, GROWTH)

    def close(self, handle: int) -> None:
        """Forgets the session; its slots belong to the pool."""
        self._sessions.pop(handle, None)

    def saw(self, seen: SeenPass) -> None:
        """Takes the pairs of all tokens that the pass committed."""
        self._use_compiled()
        self._passes.saw(seen, [self._sessions[shown.handle] for shown in seen.rounds])

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows the drafts of all sessions level by level, with one call of the layer per level."""
        passes = self._passes
        drafts = [passes.begin(self._sessions[ask.handle], ask) for ask in asks]
        while growing := [at for at, draft in enumerate(drafts) if draft.tree.frontier]:
            levels: list[DraftLevel | None] = [None] * len(asks)
            for at, level in zip(growing, passes.grow([drafts[at] for at in growing]), strict=True):
                levels[at] = level
            yield levels

    def _use_compiled(self) -> None:
        """Computes with the compiled head from now on if it has become ready."""
        if self._builder is not None and self._builder.ready is not None:
            self._passes = CompiledPairs(self._builder.ready)
            self._builder = None
