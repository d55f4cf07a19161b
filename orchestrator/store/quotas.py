"""What orchestrators tell a shared store of an API key's use, and what the store answers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

STREAMS_S = 10.0
"""How long an orchestrator's number of running requests counts after its last report, in seconds."""


class QuotaUse(NamedTuple):
    """One orchestrator's report of one key, and how many requests it wants to begin."""

    key: str
    """The beginning of the key's digest."""
    reporter: str
    """Random id of the orchestrator's process."""
    streams: int | None
    """The key's quota of requests at once; None: no bound."""
    requests_per_minute: int | None
    tokens_per_minute: int | None
    running: int
    """Requests of the key that run at the reporter, without those that are about to begin."""
    tokens: int
    """Tokens spent since the last report."""
    beginning: int = 0
    """Requests that are to begin, all or none; 0: the report asks for nothing."""


class QuotaState(NamedTuple):
    """A key's state at all orchestrators together, after a report."""

    refused: str
    """Which bound keeps the requests from beginning: streams, requests or tokens; empty: none does."""
    elsewhere: int
    """Requests of the key that run at other orchestrators."""
    requests_left: float
    """Requests that the key has left of this minute; meaningless without a quota of requests."""
    tokens_left: float
    """Tokens that the key has left of this minute, below 0 where an answer has overdrawn them; meaningless
    without a quota of tokens."""


@runtime_checkable
class QuotaStore(Protocol):
    """Counts the use of API keys over all orchestrators. Every method may raise StoreUnavailable."""

    async def use_quotas(self, uses: Sequence[QuotaUse]) -> list[QuotaState | None]:
        """Take these reports; returns the state of each key, or None for an entry of another version.

        A request that begins is counted in the same step that checks it.
        """

    async def count_orchestrators(self, reporter: str) -> int:
        """Number of orchestrators that called this in the last seconds, this one included."""
