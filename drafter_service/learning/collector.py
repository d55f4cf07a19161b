"""Makes passages of what verifiers say of followed sessions; keeps only text that the owner may keep."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.learning.cuts import PLACES, cuts, is_exam, session_number
from outrider.learning.owner import LearnOwner
from outrider.learning.passages import Passage, PassageBuffer
from outrider.source.followed import FollowedSession
from speculative.observed import TopIds


@dataclass(slots=True)
class _OpenPassage:
    """The places of a session since its last passage."""

    number: int
    end: int = 0
    """Number of ids up to and including the last place."""
    tops: list[TopIds] = field(default_factory=list)
    wrong: list[bool] = field(default_factory=list)


class Collector:
    """Collects passages of the sessions that the owner may learn from.

    Args:
        tops: number of the target's likeliest ids at each place.
    """

    def __init__(self, owner: LearnOwner, buffer: PassageBuffer, tops: int) -> None:
        self._owner = owner
        self.buffer = buffer
        """Where passages go."""
        self._count = tops
        self._open: dict[FollowedSession, _OpenPassage] = {}

    def may_keep(self, session: FollowedSession) -> bool:
        """Whether text of this session may be kept."""
        return self._owner.may_keep(session.key.tenant, session.request.learn)

    def committed(self, session: FollowedSession, tops: Sequence[TopIds], fresh: int, drafted: int) -> None:
        """Takes the tops of a session's last ids.

        Args:
            tops: what the target said at the places of the last ids, maybe of fewer than `fresh`.
            fresh: how many ids are new.
            drafted: how many of the new ids, from the first one on, the drafter's tree had.
        """
        if not self.may_keep(session):
            return
        usable = [top for top in tops[-fresh:] if len(top.ids) == self._count] if fresh else []
        if not usable or len(usable) < min(len(tops), fresh):
            return
        kept = self._open.get(session)
        if kept is None:
            kept = self._open[session] = _OpenPassage(session_number(session.key.tenant, session.key.session))
        length, count = len(session.ids), len(usable)
        if kept.end != length - count:
            self._close(session, kept)  # places without tops lie between
        kept.tops += usable
        kept.wrong += [place >= drafted for place in range(fresh - count, fresh)]
        kept.end = length
        if len(kept.tops) >= PLACES:
            self._close(session, kept)

    def ended(self, session: FollowedSession) -> None:
        """Keeps what is open of a session that is no longer followed."""
        if (kept := self._open.pop(session, None)) is not None:
            self._close(session, kept)

    def _close(self, session: FollowedSession, kept: _OpenPassage) -> None:
        """Adds the open places as passages of at most PLACES places, and begins anew."""
        tops, wrong, first = kept.tops, kept.wrong, kept.end - len(kept.tops)
        kept.tops, kept.wrong = [], []
        for start, low, high in cuts(first, kept.end):
            said = tops[low - first : high - first]
            passage = Passage(
                session.key.tenant,
                kept.number,
                start,
                np.array(session.ids.array[start:high], dtype=np.uint32),
                np.array([top.ids for top in said], dtype=np.uint32),
                np.array([top.logprobs for top in said], dtype=np.float16),
                np.array(wrong[low - first : high - first]),
            )
            self.buffer.add(passage, exam=is_exam(kept.number))
