"""What a draft policy sees and decides; the base class has the answers that bound nothing.

Knows nothing of trees, models, sessions or clocks: milliseconds come with what it sees.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of a session's drafts until the next progress."""

    depth: int
    """Longest path from below the last committed token to a leaf, in nodes."""
    floor: float
    """Survival below which a node is neither sent nor expanded."""
    nodes: int
    """Most nodes that are under way at a time."""
    children: int
    """Most children of one node."""


class DraftPoint(NamedTuple):
    """A drafted node, where the policy decides whether the draft goes on below it."""

    depth: int
    """The node's distance from the last committed token, from 1."""
    probability: float
    """The estimate that it is accepted, given its parent."""
    survival: float
    """The estimate that the node's whole path is accepted."""


class Guess(NamedTuple):
    """A drafted token in the place of a committed one."""

    probability: float
    """The source's estimate that the node is accepted, given its parent, before the policy's correction."""
    hit: bool
    """Whether this token was committed."""


class JudgedPlace(NamedTuple):
    """A committed place for which the source had sent at least one token."""

    depth: int
    """The place's distance from the last token that was committed before, from 1."""
    guesses: tuple[Guess, ...]
    """What the source had sent for this place."""
    entropy: float = 0.0
    """Entropy in nats of the distribution that the guesses came from; 0 where the policy does not ask."""

    @property
    def hit(self) -> bool:
        """Whether one of the guesses was committed."""
        return any(guess.hit for guess in self.guesses)


@dataclass(frozen=True, slots=True)
class SeenProgress:
    """What a source learns from committed tokens."""

    tokens: int
    """How many tokens were committed."""
    trials: tuple[JudgedPlace, ...]
    """Committed places that the source had drafted for, in order: all hits but perhaps the last."""
    ms: float = 0.0
    """Milliseconds since the progress before; 0: not known."""

    @property
    def drafted_all(self) -> bool:
        """Whether the source had drafted, and nothing that it drafted along the path was wrong."""
        return bool(self.trials) and self.trials[-1].hit

    @property
    def missed(self) -> bool:
        """Whether the target chose another token where the source had drafted one."""
        return bool(self.trials) and not self.trials[-1].hit


class DraftPolicy:
    """Decides how far one session's drafts go. This base class keeps the service's own bounds.

    Args:
        bounds: the bounds of the service; no policy goes beyond them.
        value: the policy's number, as in `fixed:4`; see `speculative.policies.names`.
        learnt: what sessions of the worker share, made by `learnt_anew`; None: nothing.
    """

    reads_entropy = False
    """Whether the policy uses the entropy of the source's distributions."""

    def __init__(self, bounds: DraftLimits, value: float, learnt: object = None) -> None:
        self.bounds = bounds
        self.value = value

    @classmethod
    def learnt_anew(cls, bounds: DraftLimits) -> object:
        """Makes what the sessions of a worker share under this policy; None: they share nothing."""
        return None

    @property
    def limits(self) -> DraftLimits:
        """Bounds of the drafts from now to the next progress."""
        return self.bounds

    def estimate(self, probability: float, depth: int, entropy: float) -> float:
        """The probability that a node is accepted given its parent, from the source's own estimate of it."""
        return probability

    def goes_on(self, point: DraftPoint) -> bool:
        """Whether the draft goes on below a node; asked before the source computes what may follow."""
        return True

    def drafts_after(self, entropy: float) -> bool:
        """Whether to draft from a distribution of this entropy (in nats), where `reads_entropy` is set.

        Not asked below the last committed token: a source drafts at least one place ahead.
        """
        return True

    def saw(self, progress: SeenProgress) -> None:
        """Learns from what was committed."""
