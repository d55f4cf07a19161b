"""The plan of a rolling upgrade: which process moves to which release, one after another. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from benchmarks.chaos.fault_plan import FleetProcess

ORDERS = {
    "documented": ("drafter", "retrieval", "verifier", "orchestrator"),
    "opposite": ("orchestrator", "verifier", "retrieval", "drafter"),
}
"""Orders in which roles move to the present release; the way back to the previous one is the reverse."""


class Release(StrEnum):
    """One of the two releases whose processes run beside each other."""

    PREVIOUS = "previous"
    PRESENT = "present"


@dataclass(frozen=True, slots=True)
class Roll:
    """One process moves to a release."""

    process: FleetProcess
    to: Release

    def __str__(self) -> str:
        return f"{self.process} to the {self.to} release"


def plan_rolls(orders: Sequence[str], fleet: Mapping[str, int]) -> list[Roll]:
    """For each order all processes to the present release, one at a time, and back in the reverse order.

    Args:
        orders: keys of ORDERS.
        fleet: number of processes of each role; roles that no order names stay as they are.
    """
    rolls = []
    for order in orders:
        there = [FleetProcess(role, number) for role in ORDERS[order] for number in range(fleet[role])]
        rolls += [Roll(process, Release.PRESENT) for process in there]
        rolls += [Roll(process, Release.PREVIOUS) for process in reversed(there)]
    return rolls


def mixes(rolls: Sequence[Roll]) -> Iterator[dict[FleetProcess, Release]]:
    """The release of every process that rolls, at first and after each roll; all begin with the previous."""
    running = {roll.process: Release.PREVIOUS for roll in rolls}
    yield dict(running)
    for roll in rolls:
        running[roll.process] = roll.to
        yield dict(running)


def pairs_beside(rolls: Sequence[Roll]) -> set[tuple[str, Release, str, Release]]:
    """Pairs of roles, of different releases, that some mix has beside each other: the smaller name first."""
    return {
        (one.role, mix[one], other.role, mix[other])
        for mix in mixes(rolls)
        for one, other in combinations(sorted(mix, key=str), 2)
        if mix[one] is not mix[other]
    }
