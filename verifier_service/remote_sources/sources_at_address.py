"""The sources that one session has at one address: they hear of the session together, or none of them does.

A worker may draft under several names (`corpus` and `past`, for instance). One message tells it what was
committed, whichever names listen. So its names rest together, and what they gain together is weighed against
what that message and their drafts cost the target.
"""

from verifier_service.engine.source_policy import AddressReputation
from verifier_service.observe.round_log import Rest
from verifier_service.remote_sources.source_presence import SourcePresence
from verifier_service.remote_sources.source_rests import LEAST_PRICE, SourceThrottle

_MOST_COST = 0.9
"""The most that a source is taken to cost: where it seems to cost all, something else is at work."""


class SourcesAtAddress:
    """The remote sources of one session that share an address.

    Args:
        names: the names of all sources that the session has there.
        reputation: what other sessions found out about them.
    """

    __slots__ = ("indices", "names", "presence", "throttle")

    def __init__(self, names: tuple[str, ...], reputation: AddressReputation) -> None:
        self.names = names
        self.indices: set[int] = set()
        """Source indices of those that the session listens to."""
        self.presence: SourcePresence | None = reputation.presence
        """What they cost the target; None: that is not measured."""
        self.throttle = SourceThrottle(reputation.activity)
        """Decides whether they are sent the session's progress."""

    @property
    def is_paused(self) -> bool:
        """Whether a trial leaves the address alone."""
        return self.presence is not None and self.presence.paused

    def rest(self, *, paused: bool) -> Rest:
        """Why the sources are not sent the last round, if so; `paused`: a trial leaves them alone."""
        if self.throttle.resting:
            return Rest.NOT_ADMITTED if self.throttle.is_spared else Rest.GAINS_TOO_LITTLE
        return Rest.COMPARED if paused else Rest.NONE

    def slowdown(self, sessions: int) -> float | None:
        """Part of its speed that a step of `sessions` sessions loses by the sources; None: not measured."""
        return None if self.presence is None else self.presence.measured(sessions)

    def price(self, sessions: int) -> float:
        """Rounds that they have to save for each that they are sent, in steps of `sessions` sessions."""
        cost = 0.0 if self.presence is None else min(_MOST_COST, self.presence.cost(sessions))
        return max(LEAST_PRICE, cost / (1.0 - cost))
