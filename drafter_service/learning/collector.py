"""Makes passages of what verifiers say of followed sessions; keeps only text that the owner may keep."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from drafter_service.learning.owner import LearnOwner
from drafter_service.learning.passages import Passage, PassageBuffer
from outrider.source.followed import FollowedSession
from outrider.wire.codec import SessionKey
from speculative.observed import TopIds

PLACES = 64
"""Places of a passage, at most."""
CONTEXT = 192
"""Ids before the first place, at most."""
EXAM_EVERY = 4
"""About one session in this many is for scoring: lessons train on nothing of that session. A session's name
decides, so a session that is followed anew stays where it was, and so do all answers to one prompt."""


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
            kept = self._open[session] = _OpenPassage(_number(session.key))
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
        for low in range(0, len(tops), PLACES):
            high = min(len(tops), low + PLACES)
            start = max(0, first + low - CONTEXT)
            if start == first + low:
                continue  # nothing comes before the first id
            passage = Passage(
                session.key.tenant,
                kept.number,
                start,
                np.array(session.ids.array[start : first + high], dtype=np.uint32),
                np.array([top.ids for top in tops[low:high]], dtype=np.uint32),
                np.array([top.logprobs for top in tops[low:high]], dtype=np.float16),
                np.array(wrong[low:high]),
            )
            self.buffer.add(passage, exam=kept.number % EXAM_EVERY == 0)


def _number(key: SessionKey) -> int:
    """A number that all choices of a session share, the same each time that the session is followed."""
    return int.from_bytes(blake2b(f"{key.tenant}\0{key.session}".encode(), digest_size=6).digest())
