"""What a source of a session's own text has been worth to earlier sessions: rounds saved, and time taken.

Pure; knows nothing of sessions, drafts or clocks.
"""

from dataclasses import dataclass, field

from verifier_service.remote_sources.source_rests import LEAST_PRICE, SourceActivity

_WEIGHT = 1 / 64
"""Weight of one round in what a source has saved lately."""
_UNKNOWN = 0.25
"""Rounds that a source is taken to save in each round before anything is known of it: more than it costs."""
_TIMED = 64
"""Rounds over which the time of a draft is averaged."""
_FEW = 4
"""Rounds after which that mean tells slow drafts from interrupted ones."""
_SLOW = 4.0
"""Multiple of the mean above which a draft was interrupted, and counts as this multiple."""
_MOST_PRICE = 9.0
"""The highest price, in rounds, however many sessions wait: steps are slower than their forwards."""


@dataclass(slots=True)
class DraftTime:
    """How long drafts of one kind take, in milliseconds. An interrupted draft counts as a slow one."""

    mean: float = 0.0
    rounds: int = 0
    """Rounds in the mean, at most 64; each later round counts for 1/64."""

    def learn(self, ms: float) -> None:
        """Learns from one draft."""
        self.rounds = min(self.rounds + 1, _TIMED)
        if self.rounds <= _FEW:  # the quickest of a few drafts was not interrupted
            self.mean = min(ms, self.mean) if self.rounds > 1 else ms
        else:
            self.mean += (min(ms, _SLOW * self.mean) - self.mean) / self.rounds


@dataclass(slots=True)
class SourceRecord:
    """What a source saved in the rounds of earlier sessions, and what it cost; the latest count most."""

    saved: float = _UNKNOWN
    """Running mean of the rounds that the source saved in each round in which it was asked."""
    price: float = LEAST_PRICE
    """Rounds that the source has to save in each round in which it is asked: what the last one cost."""
    offered: DraftTime = field(default_factory=DraftTime)
    """How long the source takes in a round in which it offers a draft."""
    silent: DraftTime = field(default_factory=DraftTime)
    """How long it takes in a round in which it offers none."""
    offering: float = 1.0
    """Running share of the rounds in which it offers a draft."""
    worthless: int = 0
    """Number of drafts whose nodes were worth less than their rows cost."""

    def learn(self, saved: float) -> None:
        """Learns what the source saved in a round in which it was asked."""
        self.saved += _WEIGHT * (saved - self.saved)

    def took(self, ms: float, *, offers: bool) -> None:
        """Learns how long the source took in a round, and whether it offered a draft."""
        self.offering += _WEIGHT * (offers - self.offering)
        (self.offered if offers else self.silent).learn(ms)

    @property
    def ms(self) -> float:
        """Mean of the milliseconds that the source takes to draft for a round; merging the draft included."""
        return self.offering * self.offered.mean + (1.0 - self.offering) * self.silent.mean

    def charge(self, sessions: int, pass_ms: float) -> float:
        """The price of a round in a step of `sessions` sessions whose forward took `pass_ms` milliseconds.

        All sessions of the step wait while the source drafts for one of them. Where the forward was not
        timed, which 0 says, the price is the least.
        """
        cost = sessions * self.ms / pass_ms if pass_ms else 0.0
        self.price = min(max(LEAST_PRICE, cost), _MOST_PRICE)
        return self.price

    def activity(self) -> SourceActivity:
        """Counts for one more session: a source that saves too little has a few rounds to prove otherwise."""
        return SourceActivity() if self.saved >= self.price else SourceActivity.doubtful()
