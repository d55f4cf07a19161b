"""Who has keys and values in memory, who waits for them, and who gives them up.

Sessions start in order of arrival: first those that ran before, here or on a worker that is gone, then new
ones, of which the tenant with the fewest running goes first. Where a step needs more blocks than there are,
it first goes without drafts; then the youngest session gives its blocks up and waits at its old place, to be
computed again from its ids. The oldest never does, so that some session always comes to its end.
Pure: knows handles and numbers of blocks, nothing of sessions, memory or time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class _Place:
    """A session's place in the order."""

    arrival: int
    tenant: str
    begun: bool
    """Whether somebody has seen it decode already."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a running session's rows of the next step take."""

    handle: int
    held: int
    """Blocks it has, all of which come back if it gives them up."""
    bare: int
    """Blocks it lacks for its pending ids."""
    drafted: int
    """Blocks it lacks for its drafted nodes as well."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a step fits into memory."""

    drafts: bool
    """Whether there is room for drafted nodes."""
    victims: tuple[int, ...]
    """Sessions that have to give up what they hold first."""


class Scheduler:
    """The order of all sessions of a worker.

    Args:
        most_running: sessions that may have keys and values at once.
    """

    def __init__(self, most_running: int) -> None:
        self._most_running = most_running
        self._arrivals = 0
        self._running: dict[int, _Place] = {}
        self._waiting: dict[int, _Place] = {}
        self._by_tenant: Counter[str] = Counter()

    @property
    def running(self) -> list[int]:
        """Handles of the sessions that run, the oldest first."""
        return sorted(self._running, key=lambda handle: self._running[handle].arrival)

    @property
    def waiting(self) -> int:
        """How many sessions wait."""
        return len(self._waiting)

    def add(self, handle: int, tenant: str = "", begun: bool = False) -> None:
        """A session arrives; `begun`: it has decoded before, on this worker or another."""
        self._arrivals += 1
        self._waiting[handle] = _Place(self._arrivals, tenant, begun)

    def remove(self, handle: int) -> None:
        """A session is no longer there; one that is unknown already is no fault."""
        self._waiting.pop(handle, None)
        self._stop(handle)

    def next(self) -> int | None:
        """Who starts next; None where nobody waits or enough run. It stays the same until it starts."""
        if not self._waiting or len(self._running) >= self._most_running:
            return None
        return min(self._waiting, key=self._turn)

    def start(self, handle: int) -> None:
        """The session has keys and values from now on."""
        place = self._running[handle] = self._waiting.pop(handle)
        self._by_tenant[place.tenant] += 1

    def preempt(self, handle: int) -> None:
        """A running session gave up its keys and values and waits at its old place."""
        place = self._stop(handle)
        if place is not None:
            self._waiting[handle] = replace(place, begun=True)

    def _stop(self, handle: int) -> _Place | None:
        place = self._running.pop(handle, None)
        if place is not None:
            self._by_tenant[place.tenant] -= 1
            if not self._by_tenant[place.tenant]:
                del self._by_tenant[place.tenant]
        return place

    def _turn(self, handle: int) -> tuple[bool, int, int]:
        place = self._waiting[handle]
        fewest = 0 if place.begun else self._by_tenant[place.tenant]
        return not place.begun, fewest, place.arrival


def may_start(need: int, available: int, running: int) -> bool:
    """Whether a session that needs so many blocks to begin should begin beside so many others.

    Each of these may soon want a block more: a session that came in only to be sent away would have cost
    its prefill for nothing. Alone, a session always begins: what could not fit was refused when it came.
    """
    return not running or need + running + 1 <= available


def fit(needs: Sequence[Need], available: int) -> Fit:
    """How the step of these sessions, the oldest first, fits into the blocks that are free or evictable."""
    if sum(need.bare + need.drafted for need in needs) <= available:
        return Fit(True, ())
    left = list(needs)
    victims = []
    while len(left) > 1 and sum(need.bare for need in left) > available:
        youngest = left.pop()
        victims.append(youngest.handle)
        available += youngest.held
    return Fit(False, tuple(victims))
