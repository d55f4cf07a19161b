"""Is a verifier alive? Judged by its beats and its answers, never by one session's silence.

Pure: the caller passes the time (seconds of any monotonic clock). Knows nothing of connections or sessions.
"""

from enum import Enum

PATIENCE = 5.0
"""How many expected step durations may pass before an engine counts as stuck."""
LONE = 3.0
"""How much longer a verifier may be silent where no other could do better."""


class Verdict(Enum):
    """What to do: nothing, ask it directly, or give its sessions up."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class Judge:
    """Judges one verifier.

    A beat announces a step and how long it should take. After `suspect_s` without one the verifier is suspect
    and worth a probe: a step may be long, but the process answers beside it. It is dead once it has shown no
    sign of life (beat or answered probe) for `silent_s`, or no beat for `max(stalled_s, 5 x expected)` though
    it answers. One that has no peer to go on with its sessions is given LONE times as long to be silent.
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
        """A beat arrived; the step that begins is expected to take `expected_us` microseconds."""
        self._beat_at = now
        self._expected_s = expected_us * 1e-6

    def answered(self, now: float) -> None:
        """It answered a probe: the process lives, whatever its engine does."""
        self._answered_at = now

    def silence(self, now: float) -> float:
        """Seconds since the last sign of life."""
        return now - max(self._beat_at, self._answered_at)

    def verdict(self, now: float, lone: bool = False) -> Verdict:
        """What the silence up to `now` means."""
        without_beat = now - self._beat_at
        patience = max(self._stalled_s, PATIENCE * self._expected_s)
        silent_s = self._silent_s * (LONE if lone else 1.0)
        if self.silence(now) > silent_s or without_beat > patience:
            return Verdict.DEAD
        return Verdict.SUSPECT if without_beat > self._suspect_s else Verdict.ALIVE
