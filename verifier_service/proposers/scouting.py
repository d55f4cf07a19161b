"""What proposers share that ask for scouts: their sessions, and what a scout is worth to them. Pure."""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

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
