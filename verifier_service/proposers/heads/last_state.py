"""Drafts with heads that read one hidden state: that of the position before a session's last token."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    SeenPass,
)
from verifier_service.proposers.heads.draft import HeadDraft, HeadGrowth, HeadSession, Logits
from verifier_service.proposers.heads.plan import HeadLimits


class LastStateProposer(ABC):
    """Base of batched proposers whose head k gives the tokens of level k.

    Args:
        count: number of heads.
        needs: as planned.
        limits: limits of the target.
    """

    def __init__(self, count: int, needs: ProposerNeeds, limits: HeadLimits) -> None:
        self.needs = needs
        self._limits = limits
        self._growth = HeadGrowth(depth=count)
        self._sessions: dict[int, HeadSession] = {}
        self._last: dict[int, tuple[int, Tensor]] = {}
        """Position and hidden state of each session's last computed token, by handle."""

    @abstractmethod
    def rows(self, index: int, hidden: Tensor, drafts: Sequence[HeadDraft]) -> Sequence[Logits]:
        """What head `index` says: for each draft a row per node of its frontier, or one row for all nodes.

        Args:
            index: number of the head, from 0.
            hidden: hidden states of the drafts, ``[drafts, width]``.
            drafts: drafts that have a frontier.
        """

    def open(self, session: ProposedSession) -> None:
        """Begins a session, whose hidden states come with its first pass."""
        self._sessions[session.handle] = self._limits.session(session, self._growth)

    def close(self, handle: int) -> None:
        """Forgets the session."""
        self._sessions.pop(handle, None)
        self._last.pop(handle, None)

    @torch.inference_mode()
    def saw(self, seen: SeenPass) -> None:
        """Keeps the hidden state of each session's last computed position."""
        assert seen.features is not None
        rounds = [shown for shown in seen.rounds if shown.rows]
        kept = seen.features[0, [shown.rows[-1] for shown in rounds]]
        for shown, hidden in zip(rounds, kept, strict=True):
            self._last[shown.handle] = shown.first + len(shown.rows) - 1, hidden

    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        """Grows the drafts of all sessions, one head per level."""
        ready = [at for at, ask in enumerate(asks) if self.can_draft(ask.handle)]
        if not ready:
            return
        drafts = [HeadDraft(self._sessions[asks[at].handle], asks[at].node_limit) for at in ready]
        with torch.inference_mode():
            hidden = self.hidden([asks[at] for at in ready])
        for index in range(self._growth.depth):
            growing = [at for at, draft in enumerate(drafts) if draft.frontier]
            if not growing:
                return
            with torch.inference_mode():
                found = self.rows(index, hidden[growing], [drafts[at] for at in growing])
            levels: list[DraftLevel | None] = [None] * len(asks)
            for rows, at in zip(found, growing, strict=True):
                levels[ready[at]] = drafts[at].grow(rows)
            yield levels

    def hidden(self, asks: Sequence[DraftAsk]) -> Tensor:
        """The states that the heads read of sessions that can be drafted for, ``[asks, width]``."""
        return torch.stack([self._last[ask.handle][1] for ask in asks])

    def can_draft(self, handle: int) -> bool:
        """Whether the proposer has the hidden state of the position before a session's last token."""
        last = self._last.get(handle)
        return last is not None and last[0] == len(self._sessions[handle].session.ids) - 2
