"""Which process is harmed when, how, and for how long: drawn from a seed, so that a run can be had again.

Pure: knows no process and no clock; whoever carries it out says the time and who is ready.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

INDISPENSABLE = frozenset({"verifier", "orchestrator"})
"""Roles of which one is harmed only while another is ready."""
OFTEN = 2
"""How many times more of their faults there are than of each of the others."""
FIRST_S = 3.0
JITTER = 0.8
"""How far from even the times are, as a share of the mean distance."""


class Harm(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL; started again after a while."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT after a while."""
    SLOW = "slow"
    """Held and let go many times a second, so that it runs for a small part of the time."""
    RESTART = "restart"
    """SIGTERM; started again once it has ended."""


LASTS_S = {
    Harm.KILL: (0.0, 2.0),
    Harm.FREEZE: (0.2, 6.0),
    Harm.SLOW: (2.0, 6.0),
    Harm.RESTART: (0.0, 0.0),
}
"""Shortest and longest: of a hold, or until what was killed is started again."""


@dataclass(frozen=True, slots=True)
class Process:
    """One of those that run."""

    role: str
    number: int

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One harm to one process, `at_s` seconds from the start or as soon after as is allowed."""

    at_s: float
    process: Process
    harm: Harm
    lasts_s: float


def draw_faults(seed: int, seconds: float, every_s: float, fleet: Mapping[str, int]) -> list[Fault]:
    """Faults in order of time, one each `every_s` on average, none in the last two mean distances.

    Args:
        fleet: how many processes there are of each role.

    Dealt from shuffled decks that hold every role and harm, so that a long run meets all of them evenly.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    deck: list[tuple[str, Harm]] = []
    at_s = FIRST_S
    while at_s < seconds - 2 * every_s:
        if not deck:
            deck = [(role, harm) for role in fleet for harm in Harm for _ in range(_weight(role))]
            rng.shuffle(deck)
        role, harm = deck.pop()
        process = Process(role, rng.randrange(fleet[role]))
        faults.append(Fault(round(at_s, 3), process, harm, round(rng.uniform(*LASTS_S[harm]), 3)))
        at_s += every_s * rng.uniform(1 - JITTER, 1 + JITTER)
    return faults


def is_allowed(fault: Fault, ready: Collection[Process]) -> bool:
    """Whether its process is whole, and another can do its work where there must be one."""
    process = fault.process
    if process not in ready:
        return False
    return process.role not in INDISPENSABLE or any(
        other.role == process.role and other != process for other in ready
    )


class Schedule:
    """Faults that are still to come; those that are not allowed yet wait, and others go before them."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._waiting = list(faults)

    @property
    def left(self) -> int:
        """How many are still to come."""
        return len(self._waiting)

    def due(self, now_s: float, ready: Collection[Process]) -> Fault | None:
        """The first whose time has come and that is allowed; it is out of the schedule."""
        for place, fault in enumerate(self._waiting):
            if fault.at_s > now_s:
                return None
            if is_allowed(fault, ready):
                return self._waiting.pop(place)
        return None


def _weight(role: str) -> int:
    return OFTEN if role in INDISPENSABLE else 1
