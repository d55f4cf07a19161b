"""A plan of faults, drawn from a seed so that a run can be repeated: which process suffers which harm, when.

Pure: knows no process and no clock; the caller passes the time and the processes that are ready.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

INDISPENSABLE = frozenset({"verifier", "orchestrator"})
"""Roles whose processes are harmed only while another process of the role is ready."""
INDISPENSABLE_WEIGHT = 2
"""Faults of an indispensable role for each fault of another role."""
FIRST_FAULT_S = 3.0
JITTER = 0.8
"""How far the time between two faults strays from the mean, as a share of the mean."""


class Harm(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL; the process is started again after a while."""
    FREEZE = "freeze"
    """SIGSTOP, and SIGCONT after a while."""
    SLOW = "slow"
    """SIGSTOP and SIGCONT many times a second, so that the process runs for a small part of the time."""
    RESTART = "restart"
    """SIGTERM; the process is started again once it has ended."""


LASTS_S = {
    Harm.KILL: (0.0, 2.0),
    Harm.FREEZE: (0.2, 6.0),
    Harm.SLOW: (2.0, 6.0),
    Harm.RESTART: (0.0, 0.0),
}
"""Shortest and longest seconds for which a process is held, or until a killed process is started again."""


@dataclass(frozen=True, slots=True)
class FleetProcess:
    """The name of one process under harm: its role and its number within the role."""

    role: str
    number: int

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """One harm to one process, `at_s` seconds from the start or as soon after as it is allowed."""

    at_s: float
    process: FleetProcess
    harm: Harm
    lasts_s: float


def draw_faults(seed: int, seconds: float, every_s: float, fleet: Mapping[str, int]) -> list[ProcessFault]:
    """Faults in order of time, one each `every_s` seconds on average, none in the last `2 * every_s` seconds.

    Args:
        fleet: the number of processes of each role.

    Roles and harms are dealt from shuffled decks that hold every pair, so that a long run meets all pairs
    evenly.
    """
    rng = random.Random(seed)
    faults: list[ProcessFault] = []
    deck: list[tuple[str, Harm]] = []
    at_s = FIRST_FAULT_S
    while at_s < seconds - 2 * every_s:
        if not deck:
            deck = [(role, harm) for role in fleet for harm in Harm for _ in range(_weight(role))]
            rng.shuffle(deck)
        role, harm = deck.pop()
        process = FleetProcess(role, rng.randrange(fleet[role]))
        faults.append(ProcessFault(round(at_s, 3), process, harm, round(rng.uniform(*LASTS_S[harm]), 3)))
        at_s += every_s * rng.uniform(1 - JITTER, 1 + JITTER)
    return faults


def is_allowed(fault: ProcessFault, ready: Collection[FleetProcess]) -> bool:
    """Whether the fault's process is ready, and another one too where the role is indispensable."""
    process = fault.process
    if process not in ready:
        return False
    return process.role not in INDISPENSABLE or any(
        other.role == process.role and other != process for other in ready
    )


class Schedule:
    """The faults still to come; a fault that is not allowed yet waits, and later faults go first."""

    def __init__(self, faults: Sequence[ProcessFault]) -> None:
        self._waiting = list(faults)

    def due(self, now_s: float, ready: Collection[FleetProcess]) -> ProcessFault | None:
        """Takes the first allowed fault whose time has come out of the schedule; None where there is none."""
        for place, fault in enumerate(self._waiting):
            if fault.at_s > now_s:
                return None
            if is_allowed(fault, ready):
                return self._waiting.pop(place)
        return None


def _weight(role: str) -> int:
    return INDISPENSABLE_WEIGHT if role in INDISPENSABLE else 1
