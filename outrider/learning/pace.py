"""When a lesson's child may run: a share of the time, and never while sessions need its cores."""

from dataclasses import dataclass

CALM_S = 1.0
"""Seconds without a need for the cores until a paused child goes on."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the machine is busy with."""

    sessions: int
    """Sessions that the service works for now."""
    idle_cores: float
    """Cores that nothing used lately, those counted as idle that the child itself used."""


class LessonPace:
    """Decides at every look whether the child runs until the next one.

    Args:
        duty: share of the time in which the child may run, over 0 to 1.
        cores: cores that the child computes on.
        burst_s: the longest run after a rest, in seconds.
    """

    def __init__(self, duty: float, cores: int, burst_s: float = 1.0) -> None:
        self._duty = duty
        self._cores = cores
        self._burst_s = burst_s
        self._credit_s = burst_s
        self._looked_s: float | None = None
        self._busy_until_s = 0.0
        self.runs = False
        """Whether the child runs now."""

    def look(self, now_s: float, around: Surroundings) -> bool:
        """Whether the child runs from now until the next look."""
        self._account(now_s)
        if around.sessions and around.idle_cores < self._cores:
            self._busy_until_s = now_s + CALM_S
        rested = self._credit_s > 0 if self.runs else self._credit_s >= self._burst_s / 2
        self.runs = now_s >= self._busy_until_s and (rested or self._duty >= 1)
        return self.runs

    def ended(self, now_s: float) -> None:
        """Notes that the child has ended; the time until the next child counts as rest."""
        self._account(now_s)
        self.runs = False

    def _account(self, now_s: float) -> None:
        if self._looked_s is not None:
            passed = now_s - self._looked_s
            earned = passed * self._duty - (passed if self.runs else 0.0)
            self._credit_s = min(self._burst_s, self._credit_s + earned)
        self._looked_s = now_s
