"""Which sessions have keys and values in memory, which wait for them, and which give them up.

Sessions start in order of arrival: first those that ran before, here or on a worker that is gone, then new
ones, where the tenant with the fewest running sessions goes first. A step that needs more blocks than there
are goes without drafts; if that is not enough, the youngest session gives its blocks up and waits at its old
place, to be computed again from its ids. The oldest never does, so some session always comes to its end.
Pure: knows handles and numbers of blocks, nothing of sessions, memory or time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class _Place:
    """A session's place in the order."""

    arrival: int
    tenant: str
    begun: bool
    """Whether the session has decoded before."""


class Need(NamedTuple):
    """Blocks that a running session's rows of the next step take."""

    handle: int
    held: int
    """Blocks that it holds, which come free if it gives them up."""
    bare: int
    """Blocks that it lacks for its uncomputed ids."""
    drafted: int
    """Blocks that it lacks on top for its drafted nodes."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """How a step fits into memory."""

    drafts: bool
    """Whether there is room for drafted nodes."""
    victims: tuple[int, ...]
    """Sessions that have to give their blocks up first."""


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
        self._put_off: dict[int, _Place] = {}
        self._by_tenant: Counter[str] = Counter()

    @property
    def running(self) -> list[int]:
        """Handles of the sessions that run, the oldest first."""
        return sorted(self._running, key=lambda handle: self._running[handle].arrival)

    @property
    def in_order(self) -> list[int]:
        """Handles of all sessions, running or waiting, in order of arrival."""
        places = self._running | self._waiting | self._put_off
        return sorted(places, key=lambda handle: places[handle].arrival)

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for memory, for others to end, or for what others compute."""
        return len(self._waiting) + len(self._put_off)

    def add(self, handle: int, tenant: str = "", begun: bool = False) -> None:
        """A session arrives; `begun`: it has decoded before, on this worker or another."""
        self._arrivals += 1
        self._waiting[handle] = _Place(self._arrivals, tenant, begun)

    def remove(self, handle: int) -> None:
        """Forgets a session; an unknown handle is no fault."""
        self._waiting.pop(handle, None)
        self._put_off.pop(handle, None)
        self._stop(handle)

    def next(self) -> int | None:
        """The session to start next, the same until it starts; None where none waits or enough run."""
        if not self._waiting or len(self._running) >= self._most_running:
            return None
        return min(self._waiting, key=self._turn)

    def start(self, handle: int) -> None:
        """A waiting session has keys and values from now on."""
        place = self._running[handle] = self._waiting.pop(handle)
        self._by_tenant[place.tenant] += 1

    def put_off(self, handle: int) -> None:
        """A waiting session gains by starting later; until `resume`, others start in its place."""
        self._put_off[handle] = self._waiting.pop(handle)

    def resume(self, handle: int) -> None:
        """A session that was put off may start, at its old place; an unknown handle is no fault."""
        place = self._put_off.pop(handle, None)
        if place is not None:
            self._waiting[handle] = place

    def reorder(self, handles: Sequence[int]) -> None:
        """Has these sessions exchange their places in the order of arrival, so as to be in this order."""
        groups = (self._running, self._waiting, self._put_off)
        among = [next(group for group in groups if handle in group) for handle in handles]
        places = [group[handle] for group, handle in zip(among, handles, strict=True)]
        arrivals = sorted(place.arrival for place in places)
        for group, handle, place, arrival in zip(among, handles, places, arrivals, strict=True):
            group[handle] = replace(place, arrival=arrival)

    def preempt(self, handle: int) -> None:
        """A running session gave its keys and values up, and waits at its old place."""
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
    """Whether a session that needs `need` blocks should begin beside `running` others.

    Each of the others may soon need a block more, and a session that begins only to give way has cost its
    prefill for nothing. Alone, a session always begins: one that could not fit was refused when it came.
    """
    return not running or need + running + 1 <= available


def fit(needs: Sequence[Need], available: int) -> MemoryFit:
    """How a step of these sessions, the oldest first, fits into `available` blocks."""
    if sum(need.bare + need.drafted for need in needs) <= available:
        return MemoryFit(True, ())
    left = list(needs)
    victims = []
    while len(left) > 1 and sum(need.bare for need in left) > available:
        youngest = left.pop()
        victims.append(youngest.handle)
        available += youngest.held
    return MemoryFit(False, tuple(victims))
