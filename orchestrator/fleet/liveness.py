"""Judges whether a verifier is alive: by its beats and its answers, never by the silence of one session.

Pure: the caller passes the time, in seconds of any monotonic clock. Knows nothing of connections or sessions.
"""

from enum import Enum

PATIENCE = 5.0
"""How many expected durations of a step may pass before an engine counts as stuck."""
LONE = 3.0
"""How many times longer a verifier may be silent where no other could take its sessions."""


class Verdict(Enum):
    """The action for a verifier: none, probe it, or give its sessions up."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class LivenessJudge:
    """Judges from its signs of life whether one verifier is alive.

    A beat announces a step and its expected duration. After `suspect_s` without a beat the verifier is
    suspect and worth a probe: a step may be long, but the process answers beside it. The verifier is dead
    once it has shown no sign of life (beat or answered probe) for `silent_s`, or no beat for `max(stalled_s,
    5 x expected)` though it answers probes. A verifier whose sessions no other could take may be silent LONE
    times as long.
    """

    def __init__(
        self, now: float, *, suspect_s: float = 0.5, silent_s: float = 0.75, stalled_s: float = 60.0
    ) -> None:
        self._suspect_s = suspect_s
        self._silent_s = silent_s
        self._stalled_s = stalled_s
        self._beat_at = now
        self._answered_at = now
        self._expected_s = 0.0

    def beat(self, now: float, expected_us: int) -> None:
        """A beat arrived; the step that begins should take `expected_us` microseconds."""
        self._beat_at = now
        self._expected_s = expected_us * 1e-6

    def answered(self, now: float) -> None:
        """The verifier answered a probe: its process lives, whatever its engine does."""
        self._answered_at = now

    def stood_still(self, now: float, seconds: float) -> None:
        """This process did not run for `seconds` up to `now`, and could hear no worker meanwhile."""
        self._beat_at = min(now, self._beat_at + seconds)
        self._answered_at = min(now, self._answered_at + seconds)

    def silence(self, now: float) -> float:
        """Seconds since the last sign of life in which this process ran."""
        return now - max(self._beat_at, self._answered_at)

    def verdict(self, now: float, lone: bool = False) -> Verdict:
        """The verdict on the silence up to `now`.

        `lone` says that no other verifier could take the sessions.
        """
        without_beat = now - self._beat_at
        patience = max(self._stalled_s, PATIENCE * self._expected_s)
        silent_s = self._silent_s * (LONE if lone else 1.0)
        if self.silence(now) > silent_s or without_beat > patience:
            return Verdict.DEAD
        return Verdict.SUSPECT if without_beat > self._suspect_s else Verdict.ALIVE
