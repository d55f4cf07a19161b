"""What computes with a head of one decoder layer: eager torch, or a compiled kernel."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from verifier_service.proposers.batched import DraftAsk, DraftLevel, SeenPass
from verifier_service.proposers.heads.draft import HeadDraft, HeadGrowth, HeadSession

GROWTH = HeadGrowth(depth=7, width=6)
MOST_ROWS = 1 + (GROWTH.depth - 1) * GROWTH.width
"""Most rows of one draft, over all levels."""


class PairDraft(Protocol):
    """One session's draft, with what its deeper levels need of the levels above."""

    tree: HeadDraft


Draft = TypeVar("Draft", bound=PairDraft)


class PairPasses(Protocol[Draft]):
    """Writes pairs of committed tokens, and computes drafts level by level; for all sessions at once."""

    def saw(self, seen: SeenPass, sessions: Sequence[HeadSession]) -> None:
        """Writes the pairs of all tokens that the pass committed; one of the sessions for each round."""

    def begin(self, session: HeadSession, ask: DraftAsk) -> Draft:
        """A draft without a level."""

    def grow(self, drafts: Sequence[Draft]) -> list[DraftLevel | None]:
        """One more level of these drafts, each of which has nodes to expand."""
