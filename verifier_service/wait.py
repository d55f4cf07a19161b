"""Whether a step should wait a little for the next draft, and how long.

Only a step with exactly one ready session ever asks. Going now yields `expected` tokens in `step_ms`; a
node that survives with probability s and comes in w ms is worth waiting for while s / w > expected /
step_ms. Pure: the caller's clock is an argument; knows nothing of queues, sessions or trees.
"""

from dataclasses import dataclass, field

_WEIGHT = 0.15
# A source that sent nothing useful for this many rounds is silent, and nobody waits for it.
_SILENT_ROUNDS = 3
_MAX_DOUBLINGS = 10
_SHORTEST_MS = 0.05
# Longer gaps are pauses between requests or a stopped peer, not a pace to learn.
_LONGEST_MS = 100.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a step would yield if it began now."""

    expected: float
    """Tokens it commits on average: 1 and the survival of every node it would admit."""
    step_ms: float
    """How long it takes; 0 where that is not known yet."""
    leaf: float
    """Survival of the path that the next node would continue; 1 where nothing is drafted."""


@dataclass(slots=True)
class SourcePace:
    """How fast and how well a remote source drafts for a session. Times are in ms on the caller's clock."""

    acceptance: float = 0.5
    _first_ms: float | None = None
    _interval_ms: float | None = None
    _committed_at: float = 0.0
    _arrived_at: float = 0.0
    _bare: bool = field(default=True)
    _silent_rounds: int = _SILENT_ROUNDS
    _fruitless: int = 0
    _skip: int = 0

    @property
    def silent(self) -> bool:
        """Whether nobody is to wait for it now, whatever it would bring."""
        return self._skip > 0 or self._silent_rounds >= _SILENT_ROUNDS

    def committed(self, now: float, bare: bool) -> None:
        """A round was committed and published; `bare` says that no drafted node outlived it."""
        self._committed_at = now
        self._bare = bare
        self._silent_rounds += 1
        self._skip = max(0, self._skip - 1)

    def arrived(self, at: float) -> None:
        """A draft of which something was kept came in."""
        since = at - (self._committed_at if self._bare else self._arrived_at)
        if 0.0 <= since <= _LONGEST_MS:
            if self._bare:
                self._first_ms = _learn(self._first_ms, since)
            else:
                self._interval_ms = _learn(self._interval_ms, since)
        self._arrived_at = at
        self._bare = False
        self._silent_rounds = 0

    def judged(self, hit: bool) -> None:
        """The target chose a token where this source had drafted one: whether it was that one."""
        self.acceptance += _WEIGHT * (hit - self.acceptance)

    def waited(self, fruitful: bool) -> None:
        """A wait for this source ended; one that gave nothing doubles the rounds until the next."""
        if fruitful:
            self._fruitless = 0
            return
        self._skip = 2 << min(self._fruitless, _MAX_DOUBLINGS)
        self._fruitless += 1

    def patience_ms(self, now: float, standing: Standing, most_ms: float) -> float:
        """How many ms more, up to `most_ms`, are worth waiting for this source's next node; 0: go now."""
        if self.silent or standing.step_ms <= 0.0:
            return 0.0
        typical = self._first_ms if self._bare else self._interval_ms
        if typical is None:
            return 0.0
        left = (self._committed_at if self._bare else self._arrived_at) + typical - now
        if left <= 0.0:
            # Late: likely to stay away for as long again, and given up once that has passed too.
            left = typical / 2 - left if -left < typical else most_ms + 1.0
        left = max(left, _SHORTEST_MS)
        worth = standing.leaf * self.acceptance / left > standing.expected / standing.step_ms
        return left if worth and left <= most_ms else 0.0


def _learn(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
