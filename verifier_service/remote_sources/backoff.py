"""How long to stay away from a peer that failed. Pure: the caller sleeps and supplies the randomness."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Delays that double from `first_s` to `most_s`, each scaled by a random share of its own."""

    first_s: float
    most_s: float
    _failures: int = 0

    def failed(self, chance: float) -> float:
        """The delay after one more failure; `chance` in [0, 1) spreads it from half of it to all of it."""
        delay = min(self.most_s, self.first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return delay * (0.5 + chance / 2)

    def succeeded(self) -> None:
        """The next failure starts from the shortest delay again."""
        self._failures = 0
