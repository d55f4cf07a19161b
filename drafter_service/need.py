"""How many drafters the sessions of one drafter call for: the signal by which drafters are scaled. Pure.

A drafter rides ahead whenever it has a session, so that its device always looks busy. What tells a crowded
drafter from an idle one is the number of passes that a session gets between two commits of the target: the
fewer, the shallower its drafts.
"""

WANTED_PASSES = 2.0
"""Passes between two commits with which a session's drafts are deep enough for the next round."""
_PLENTY = 2 * WANTED_PASSES
"""Passes that count for a session that needed no more."""
_WEIGHT = 0.02
"""Weight of one commit in the running mean."""
_MOST = 8.0
"""The largest need: once this many drafters run, the need is measured again."""


class DraftingNeed:
    """Learns from each commit how many passes came before it."""

    def __init__(self) -> None:
        self._passes = WANTED_PASSES

    def committed(self, passes: int, sated: bool = False) -> None:
        """Notes that tokens of a session were committed, `passes` passes after the session's last commit.

        `sated`: nothing was left to draft for the session meanwhile, so that it had passes enough.
        """
        enough = max(passes, _PLENTY) if sated else passes
        self._passes += _WEIGHT * (enough - self._passes)

    def drafters(self, sessions: int) -> float:
        """Number of drafters, not rounded, for these sessions; a session drafts at one drafter at a time."""
        return min(float(sessions), _MOST, WANTED_PASSES / max(self._passes, WANTED_PASSES / _MOST))
