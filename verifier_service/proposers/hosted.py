"""One batched proposer as the host keeps it: its planes, its prices, and the sessions that it knows."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.lm.kv.pool import SlotPool
from verifier_service.engine.session import Session
from verifier_service.proposers.batched import BatchedProposer
from verifier_service.proposers.planes.proposer_planes import ProposerPlanes
from verifier_service.proposers.price import ProposerPrices

SLOW_S = 0.1
"""A call that takes longer, in seconds, is slow."""
SLOW_CALLS = 3
"""Slow calls among the last `JUDGED_CALLS` that mute a proposer."""
JUDGED_CALLS = 256
"""Calls after which a slow call no longer counts: now and then the machine is busy with something else."""


@dataclass(slots=True)
class HostedProposer:
    """One proposer, and the sessions that it was told of, by handle."""

    name: str
    proposer: BatchedProposer
    planes: ProposerPlanes | None = None
    prices: ProposerPrices = field(default_factory=ProposerPrices)
    sessions: dict[int, Session] = field(default_factory=dict)
    calls: int = 0
    """Calls so far."""
    slow_calls: deque[int] = field(default_factory=lambda: deque(maxlen=SLOW_CALLS))
    """Numbers of the last slow calls."""
    spent_s: float = 0.0
    """Seconds spent in calls to the proposer."""
    looks_away: bool = False
    """Whether the proposer, which has no planes, is shown nothing of this step."""

    sits: bool = False
    """Whether the next step leaves the proposer out, as this step did, for a comparison. The proposer is
    shown such passes later or never, so that they take as long as in a worker without it."""

    def rests(self, ready: Sequence[Session]) -> bool:
        """Whether the proposer will not draft for these sessions, as far as is known before the plan."""
        naming = self.naming(ready)
        return not naming or self.prices.rests(all(session.greedy for session in naming))

    def sits_out(self, ready: Sequence[Session], is_filled: Callable[[Session], bool]) -> bool:
        """Whether the proposer rests for long, or after a long rest finds no session that is filled."""
        if self.prices.rests_long:
            return self.rests(ready)
        naming = self.naming(ready)
        return bool(naming) and not any(map(is_filled, naming))

    def fills(self, session: Session) -> bool:
        """Whether a session that uses the proposer may begin with blocks of this session."""
        return self.planes is not None and self.proposer.needs.tenant in ("", session.key.tenant)

    def naming(self, ready: Sequence[Session]) -> list[Session]:
        """The sessions that use the proposer."""
        return [session for session in ready if self.name in session.sources.batched]

    def is_slow(self, took_s: float) -> bool:
        """Counts a call; returns whether too many of the last calls were slow."""
        self.calls += 1
        if took_s <= SLOW_S:
            return False
        self.slow_calls.append(self.calls)
        return len(self.slow_calls) == SLOW_CALLS and self.calls - self.slow_calls[0] < JUDGED_CALLS


def with_own_planes(proposers: Mapping[str, BatchedProposer], pool: SlotPool) -> list[HostedProposer]:
    """The proposers, each with its planes in the target's pool, which lie there in their order."""
    wanted = [shape for proposer in proposers.values() for shape in proposer.needs.planes]
    if not wanted:
        return [HostedProposer(name, proposer, None) for name, proposer in proposers.items()]
    first = len(pool.layout.planes) - pool.layout.guests
    if with_both := [name for name, each in proposers.items() if each.needs.planes and each.needs.tops]:
        raise ValueError(f"proposer {with_both[0]!r} needs planes and tops; one with planes gets no tops")
    if tuple(wanted) != pool.layout.planes[first:]:
        raise ValueError(f"the target was loaded without room for the planes {wanted} of its proposers")
    hosted = []
    for name, proposer in proposers.items():
        count = len(proposer.needs.planes)
        hosted.append(HostedProposer(name, proposer, ProposerPlanes(pool, first, count) if count else None))
        first += count
    return hosted
