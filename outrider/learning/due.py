"""How much new text makes a lesson due: more after each lesson that came to nothing."""

WASTED = ("memory", "killed", "late", "failed", "unloadable")
"""Ends of lessons that took time, and gave no weights that can serve."""
MOST_TIMES = 64
"""Most times `every` that a lesson waits for. What wastes lessons may pass, so they never end for good."""


class DueLessons:
    """Says when a lesson is due.

    Args:
        every: wrong places that make a lesson due, as long as none is wasted.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._times = 1

    @property
    def wanted(self) -> int:
        """Wrong places since the last lesson that make the next one due."""
        return self._every * self._times

    def ended(self, outcome: str) -> None:
        """Doubles what is wanted after a wasted lesson; a lesson that the judge decided makes it `every`.

        What ended before the lesson could show anything changes nothing: `too_few` and `stopped`.
        """
        if outcome in WASTED:
            self._times = min(2 * self._times, MOST_TIMES)
        elif outcome not in ("too_few", "stopped"):
            self._times = 1
