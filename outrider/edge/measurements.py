"""Measures what the choice of a mode depends on: round trip, jitter, acceptance, draft time and pace.

Pure: the caller passes times, in milliseconds.
"""

from dataclasses import dataclass, field

WEIGHT = 0.125
"""Weight of a new round trip in the mean, as in TCP (RFC 6298)."""
JITTER_WEIGHT = 0.25
"""Weight of a new deviation in the jitter, as in TCP (RFC 6298)."""
RECENT = 0.98
"""Factor by which each judged token makes earlier ones count less: some 50 tokens count."""
CAREFUL = 2.0
"""Wrong drafted tokens that a careful estimate adds to those that were seen."""
PRIOR_ACCEPTED, PRIOR_JUDGED = 3.0, 5.0
"""What counts as seen before the first token is judged."""


@dataclass(slots=True)
class Smoothed:
    """A mean in which recent values weigh more; None before the first value."""

    weight: float
    mean: float | None = None

    def add(self, value: float) -> None:
        """Adds a value."""
        self.mean = value if self.mean is None else self.mean + self.weight * (value - self.mean)


@dataclass(slots=True)
class TokenPace:
    """Milliseconds per token while one mode was in use; earlier tokens count less and less."""

    ms: float = 0.0
    tokens: float = 0.0

    @classmethod
    def expected(cls, ms_per_token: float, tokens: float) -> "TokenPace":
        """A pace that counts as measured over so many tokens."""
        return cls(ms_per_token * tokens, tokens)

    def add(self, took_ms: float, tokens: int) -> None:
        """Adds tokens and the time since the tokens before."""
        kept = RECENT**tokens
        self.ms = self.ms * kept + took_ms
        self.tokens = self.tokens * kept + tokens

    def forget(self, share: float) -> None:
        """Reduces the weight of earlier measurements, so that new tokens soon decide."""
        self.ms *= share
        self.tokens *= share

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token; None before a token has come."""
        return self.ms / self.tokens if self.tokens else None


@dataclass(slots=True)
class Measurements:
    """What a device has measured so far, over all of its sessions with one server."""

    rtt: Smoothed = field(default_factory=lambda: Smoothed(WEIGHT))
    """Round trips, in milliseconds."""
    jitter: Smoothed = field(default_factory=lambda: Smoothed(JITTER_WEIGHT))
    """Deviations of round trips from their mean, in milliseconds."""
    draft: Smoothed = field(default_factory=lambda: Smoothed(WEIGHT))
    """Times to draft one token, in milliseconds."""
    cloud_ms: float | None = None
    """Milliseconds per token of the target alone, as measured last; None: not measured yet."""
    pass_ms: float | None = None
    """Milliseconds per message of the target alone, as measured last; None: not measured yet."""
    accepted: float = PRIOR_ACCEPTED
    """Drafted tokens that equalled the target's, weighted."""
    judged: float = PRIOR_JUDGED
    """Drafted tokens whose place the target has decided, weighted."""

    def round_trip(self, took_ms: float) -> None:
        """Adds a round trip."""
        mean = self.rtt.mean
        self.jitter.add(took_ms / 2 if mean is None else abs(took_ms - mean))
        self.rtt.add(took_ms)

    def drafted(self, took_ms: float, tokens: int = 1) -> None:
        """Adds the time in which tokens were drafted."""
        self.draft.add(took_ms / tokens)

    def judge(self, equal: int, wrong: int) -> None:
        """Adds drafted tokens by whether the target chose the same."""
        kept = RECENT ** (equal + wrong)
        self.accepted = self.accepted * kept + equal
        self.judged = self.judged * kept + equal + wrong

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that equalled the target's, 0 to 1."""
        return self.accepted / self.judged

    @property
    def careful_acceptance(self) -> float:
        """The same share with `CAREFUL` more wrong tokens, for modes in which a wrong one costs much."""
        return self.accepted / (self.judged + CAREFUL)
