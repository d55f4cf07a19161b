"""Numbers that proposers learn from their own guesses: hit rates and the worth of a scout. Pure.

They hold counts alone, no tokens, so one object serves all sessions and tenants of a worker.
"""

from collections.abc import Sequence

_WEIGHT = 0.02
"""Weight of one guess in a running mean."""
_PRIOR_ROWS = 32.0
"""Number of scouts for which the initial estimate of their worth counts."""
_KEPT = 0.99
"""Factor by which each pass reduces the weight of earlier passes."""
_FIRST_REST, _LONGEST_REST = 64, 1024
"""Passes without a scout before scouts are tried again; doubled each time."""


class HitRates:
    """Running means of how often guesses were right, by their rank or depth.

    Args:
        first: initial hit rates.
    """

    def __init__(self, first: Sequence[float]) -> None:
        self._rates = list(first)

    def __len__(self) -> int:
        return len(self._rates)

    def __getitem__(self, index: int) -> float:
        return self._rates[index]

    def learn(self, index: int, hit: bool) -> None:
        """Learns whether a guess of this rank or depth was right."""
        self._rates[index] += _WEIGHT * (hit - self._rates[index])


class ScoutWorth:
    """Accepted tokens per computed scout of one proposer.

    Scouts that do not pay for their rows are no longer computed, so their worth could never change.
    Therefore, after a rest, scouts are offered again at their initial worth.

    Args:
        first: initial estimate of accepted tokens per scout.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._rest = _FIRST_REST
        self._idle = 0
        self._rows, self._gained = _PRIOR_ROWS, first * _PRIOR_ROWS

    @property
    def each(self) -> float:
        """Expected accepted tokens per scout, 0 to 1."""
        return min(1.0, self._gained / self._rows)

    def learn(self, rows: int, gained: int) -> None:
        """Learns how many scouts a pass computed for a session, and how many drafted tokens it accepted."""
        if rows:
            self._idle = 0
            self._rows = self._rows * _KEPT + rows
            self._gained = self._gained * _KEPT + gained
            return
        self._idle += 1
        if self._idle >= self._rest:
            self._idle, self._rest = 0, min(2 * self._rest, _LONGEST_REST)
            self._rows, self._gained = _PRIOR_ROWS, self._first * _PRIOR_ROWS
