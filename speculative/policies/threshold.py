"""A threshold that follows acceptance, by the rule of Self-Speculative Decoding (arXiv 2309.08168)."""

from speculative.policies.policy import SeenProgress

_TARGET = 0.9
"""Share of drafted places that should be accepted."""
_STEP = 0.01
_KEEP_RATE = 0.5
_KEEP_LEVEL = 0.9


class FollowingThreshold:
    """Rises while too much of what is drafted is rejected, and falls otherwise."""

    def __init__(self, level: float) -> None:
        self.level = level
        self._rate = _TARGET

    def saw(self, progress: SeenProgress) -> None:
        """Moves the level by how much of the draft along the committed path was right."""
        if not progress.trials:
            return
        rate = sum(trial.hit for trial in progress.trials) / len(progress.trials)
        self._rate = _KEEP_RATE * self._rate + (1 - _KEEP_RATE) * rate
        moved = self.level + (_STEP if self._rate < _TARGET else -_STEP)
        self.level = min(1.0, max(0.0, _KEEP_LEVEL * self.level + (1 - _KEEP_LEVEL) * moved))
