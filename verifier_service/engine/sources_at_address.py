"""The sources that one session has at one address: they hear of the session together, or none of them does.

A worker may draft under several names (`corpus` and `past`, for instance). One message tells it what was
committed, whichever names listen. So its names rest together, and what they gain together is weighed against
what that message and their drafts cost the target.
"""

from verifier_service.engine.source_policy import LEAST_SHARE, AddressReputation, SourceThrottle
from verifier_service.remote_sources.source_presence import SourcePresence


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

    def least_share(self, sessions: int) -> float:
        """Part of the session's tokens that they have to gain, in steps of `sessions` sessions."""
        return LEAST_SHARE if self.presence is None else max(LEAST_SHARE, self.presence.cost(sessions))
