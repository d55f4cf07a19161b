"""What proposers share that ask for scouts: what the target said at them, and what a scout is worth. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from speculative.hashing import EMPTY, extend, prefix_hash
from verifier_service.proposers.batched import ProposedSession, SeenPass, SeenRound
from verifier_service.proposers.hit_rates import ScoutWorth

Guesses = TypeVar("Guesses")
"""What such a proposer keeps of one session."""


class Learnt(NamedTuple):
    """What one round showed of a session's guesses."""

    computed: int
    """Scouts that the round computed."""
    right: int
    """Committed tokens that the guesses had."""


class ScoutingProposer(ABC, Generic[Guesses]):
    """Base of batched proposers whose guesses come from scouts.

    Args:
        first_worth: initial estimate of accepted tokens per scout.
    """

    def __init__(self, first_worth: float) -> None:
        self.sessions: dict[int, Guesses] = {}
        """By handle."""
        self.worth = ScoutWorth(first_worth)

    @abstractmethod
    def begin(self, session: ProposedSession) -> Guesses:
        """What the proposer keeps of a session that begins."""

    @abstractmethod
    def learn(self, guesses: Guesses, shown: SeenRound) -> Learnt:
        """Learns from a round that committed tokens, and moves the session's guesses on."""

    def open(self, session: ProposedSession) -> None:
        """Begins a session."""
        self.sessions[session.handle] = self.begin(session)

    def close(self, handle: int) -> None:
        """Forgets the session's guesses."""
        self.sessions.pop(handle, None)

    def saw(self, seen: SeenPass) -> None:
        """Learns from the rounds of a pass what the guesses and the scouts were worth."""
        for shown in seen.rounds:
            if shown.tokens:
                learnt = self.learn(self.sessions[shown.handle], shown)
                self.worth.learn(learnt.computed, learnt.right)


class CommittedHash:
    """The hash of a session's leading tokens, which only grows.

    Args:
        ids: the session's committed tokens, which grow as the session decodes.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._length = len(ids)
        self._hash = prefix_hash(ids) if len(ids) else EMPTY

    def at(self, length: int) -> int:
        """The hash of the first `length` tokens; `length` is never smaller than in the call before."""
        for position in range(self._length, length):
            self._hash = extend(self._hash, self._ids[position])
        self._length = max(length, self._length)
        return self._hash


def said_after(before: int, shown: SeenRound) -> dict[int, int]:
    """The target's token after each prefix that the round verified, noise included, by the prefix's hash.

    Args:
        before: hash of the tokens that were committed before the round.
        shown: the round.
    """
    found = {} if shown.said is None else {row.prefix_hash: row.token for row in shown.said.off_path}
    for token in shown.tokens:
        found[before] = token
        before = extend(before, token)
    return found
