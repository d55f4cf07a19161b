"""Passes of a head of one layer by the compiled kernel, which writes pairs and ranks levels."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.lm.compiled.head_kernel import CompiledHead, DraftMemory, DraftRows
from speculative.tree import ROOT
from verifier_service.proposers.batched import DraftAsk, DraftLevel, SeenPass
from verifier_service.proposers.heads.draft import HeadDraft, HeadSession
from verifier_service.proposers.heads.pair_passes import MOST_ROWS
from verifier_service.proposers.planes.proposer_planes import ProposerPlanes


@dataclass(slots=True)
class _CompiledDraft:
    """One session's draft, and the row of the kernel's memory that each expanded node has."""

    session: HeadSession
    tree: HeadDraft
    memory: DraftMemory
    rows: dict[int, int] = field(default_factory=dict)

    def level(self) -> DraftRows:
        """The nodes to expand, as rows of the kernel."""
        tree, known = self.tree, len(self.rows)
        parents = [self.rows[tree.parent(node)] if node != ROOT else -1 for node in tree.frontier]
        for row, node in enumerate(tree.frontier, known):
            self.rows[node] = row
        ranking = self.session.ranking(tree.position + 1)
        return DraftRows(
            self.memory, tree.frontier_tokens, parents, tree.position - 1, ranking, tree.least_shares
        )


class CompiledPairs:
    """PairPasses by the kernel.

    Args:
        head: the compiled head.
    """

    def __init__(self, head: CompiledHead) -> None:
        self._head = head

    def saw(self, seen: SeenPass, sessions: Sequence[HeadSession]) -> None:
        """Writes the pairs of all tokens that the pass committed."""
        features = seen.features
        assert features is not None
        if features.dtype is not torch.float32 or features.stride(2) != 1:
            raise ValueError(f"hidden states are {features.dtype} with strides {features.stride()}")
        at, between, row_size = features.data_ptr(), features.stride(0), 4 * features.stride(1)
        pairs = array("q")
        for shown, session in zip(seen.rounds, sessions, strict=True):
            before = shown.before
            # Slot 0 is never read, so any hidden state does where there is none before.
            address, stride = (at, between) if before is None else (before.data_ptr(), before.stride(0))
            slots = (slot for low, high in shown.runs for slot in range(low, high))
            ids = session.session.ids
            for position, row, slot in zip(range(shown.first, len(ids)), shown.rows, slots, strict=False):
                pairs.extend((ids[position], max(0, position - 1), slot, address, stride))
                address, stride = at + row * row_size, between
        if pairs:
            self._head.write(_planes(sessions[0]).tensors(), pairs)

    def begin(self, session: HeadSession, ask: DraftAsk) -> _CompiledDraft:
        """A draft without a level."""
        assert ask.before is not None
        memory = DraftMemory(self._head, ask.runs, ask.before, MOST_ROWS)
        return _CompiledDraft(session, HeadDraft(session, ask.node_limit), memory)

    def grow(self, drafts: Sequence[_CompiledDraft]) -> list[DraftLevel | None]:
        """One more level of these drafts, in one call."""
        planes = _planes(drafts[0].session).tensors()
        found = self._head.level(planes, [draft.level() for draft in drafts])
        return [
            draft.tree.add(level) if isinstance(level, list) else draft.tree.grow(level)
            for draft, level in zip(drafts, found, strict=True)
        ]


def _planes(session: HeadSession) -> ProposerPlanes:
    planes = session.session.planes
    assert planes is not None
    return planes
