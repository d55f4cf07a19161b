"""Judges whether a verifier is alive: by its beats and its answers, never by the silence of one session.

Pure: the caller passes the time, in seconds of any monotonic clock. Knows nothing of connections or sessions.
"""

from enum import Enum

SILENT_S = 0.6
"""Seconds without a sign of life after which a verifier is given up. While idle it beats every 0.1 s, else
before each step, and it answers probes at any time."""
STALLED_S = 60.0
"""Seconds without a beat after which a verifier that answers is given up."""
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

    A beat announces a step and its expected duration. The verifier is dead once it has shown no sign of life
    (beat or answered probe) for `silent_s`, or no beat for `max(stalled_s, 5 x expected)` though it answers
    probes. After half of `silent_s` it is suspect and worth a probe: a step may be long, but the process
    answers beside it. A verifier whose sessions no other could take may be silent LONE times as long.
    """

    def __init__(self, now: float, *, silent_s: float = SILENT_S, stalled_s: float = STALLED_S) -> None:
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
        silence, patience = self.silence(now), max(self._stalled_s, PATIENCE * self._expected_s)
        if silence > self._silent_s * (LONE if lone else 1.0) or now - self._beat_at > patience:
            return Verdict.DEAD
        return Verdict.SUSPECT if silence > self._silent_s / 2 else Verdict.ALIVE
