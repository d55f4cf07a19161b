"""Whether one more level of a batched proposer's drafts is worth its milliseconds. Pure."""

from dataclasses import dataclass, field

_WEIGHT = 0.1
"""Weight of one call in the running means."""
_FIRST_REST, _LONGEST_REST = 16, 256
"""Steps for which a proposer rests that was not worth its time; doubled each time."""
_TRIES = 4
"""Steps that try a proposer again behind a rest, whatever earlier steps taught."""


@dataclass(slots=True)
class _Level:
    """Running means over the calls that computed one level."""

    ms: float
    gain: float
    """Survival that the level added for one session."""

    def learn(self, ms: float, gain: float) -> None:
        self.ms += _WEIGHT * (ms - self.ms)
        self.gain += _WEIGHT * (gain - self.gain)


@dataclass(slots=True)
class ProposerPrice:
    """What the levels of one proposer's drafts cost, and what they gain in calibrated survival."""

    _levels: list[_Level] = field(default_factory=list)
    _seeing_ms: float = 0.0
    """Running mean of what it costs to show a pass to the proposer, in ms."""
    _rest: int = 0
    """Steps left to rest."""
    _next_rest: int = _FIRST_REST
    _tries: int = _TRIES

    def begins(self, sessions: int, tokens_per_ms: float) -> bool:
        """Whether this step asks the proposer at all; to be called once per step.

        `tokens_per_ms` is what the step yields without this proposer; 0: not known yet.
        """
        if self._rest:
            self._rest -= 1
            return False
        if self._tries:
            self._tries -= 1
            return True
        if self.pays(0, sessions, tokens_per_ms):
            self._next_rest = _FIRST_REST
            return True
        self._rest, self._tries = self._next_rest, _TRIES
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return False

    def pays(self, level: int, sessions: int, tokens_per_ms: float, before: float | None = None) -> bool:
        """Whether level number `level`, from 0, is expected to gain more tokens than its time is worth.

        `before` is the survival that the level above it has just added over all sessions.
        """
        if level >= len(self._levels):
            return True  # nothing is known of it
        known = self._levels[level]
        gain = known.gain * sessions
        if before is not None and self._levels[level - 1].gain > 0:
            gain = known.gain * before / self._levels[level - 1].gain
        cost_ms = known.ms + (0.0 if level else self._seeing_ms)
        return gain > cost_ms * tokens_per_ms

    def computed(self, level: int, ms: float, gain: float, sessions: int) -> None:
        """Learns from a level that was computed in `ms` and added a survival of `gain` over all sessions."""
        if level < len(self._levels):
            self._levels[level].learn(ms, gain / sessions)
        else:
            self._levels.append(_Level(ms, gain / sessions))

    def saw(self, ms: float) -> None:
        """Learns from a pass that was shown in `ms`."""
        self._seeing_ms += _WEIGHT * (ms - self._seeing_ms)
