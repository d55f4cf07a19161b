"""Whether a proposer's drafts make steps yield tokens faster: measured, not estimated. Pure.

Estimates of a proposer's gain rest on the survival that the proposer states and on the times of steps of
other sizes. The comparison of whole steps shows where such estimates mislead. Now and then a few steps
leave the proposer out, so that both sides are measured under the same conditions.
"""

from dataclasses import dataclass, field

_WEIGHT = 0.04
"""Least weight of one step in the running means."""
_REMEMBERED = 8
"""Steps that the past counts for, at most, once steps of one side follow steps of the other."""
_ENOUGH = 8
"""Steps of each side before they are compared."""
_LEFT_OUT = 4
"""Steps in a row that leave the proposer out for the comparison."""
_FIRST_SPELL, _LONGEST_SPELL = 16, 256
"""Steps with the proposer before some leave it out; doubled each time."""


@dataclass(slots=True)
class _StepRate:
    """Running means of steps."""

    steps: int = 0
    tokens: float = 0.0
    ms: float = 0.0

    def learn(self, tokens: int, ms: float) -> None:
        """Learns from one step; a time that an interruption made long counts as twice the mean."""
        self.steps += 1
        weight = max(_WEIGHT, 1 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.ms += weight * ((min(ms, 2 * self.ms) if self.ms else ms) - self.ms)

    def fade(self) -> None:
        """Lets the steps to come outweigh those before."""
        self.steps = min(self.steps, _REMEMBERED)


@dataclass(slots=True)
class _Sides:
    """Steps of about one number of sessions, with the proposer and without."""

    drafted: _StepRate = field(default_factory=_StepRate)
    bare: _StepRate = field(default_factory=_StepRate)
    spell: int = _FIRST_SPELL
    until: int = _FIRST_SPELL
    """Steps with the proposer until some leave it out."""
    left_out: int = 0
    """Steps that are yet to leave the proposer out."""
    last: bool = False
    """Whether the last step had the proposer."""


@dataclass(slots=True)
class MeasuredGain:
    """Compares steps with and without one proposer, by their sessions: 1, 2 or 3, 4 to 7, ..."""

    _by_size: dict[int, _Sides] = field(default_factory=dict)

    def leaves_out(self, sessions: int) -> bool:
        """Whether a step that would ask the proposer leaves it out; to be called once per such step."""
        sides = self._sides(sessions)
        if not sides.until and not sides.left_out:
            sides.left_out = _LEFT_OUT
            sides.until = sides.spell = min(2 * sides.spell, _LONGEST_SPELL)
        if sides.left_out:
            sides.left_out -= 1
            return True
        return False

    def learn(self, sessions: int, asked: bool, tokens: int, ms: float) -> None:
        """Learns from a step of these sessions that committed `tokens` tokens in `ms`, above 0."""
        sides = self._sides(sessions)
        switched, sides.last = asked != sides.last, asked
        side = sides.drafted if asked else sides.bare
        if switched:
            side.fade()
        if asked:
            sides.until = max(0, sides.until - 1)
            if switched:
                return  # the call makes up for the rounds that the proposer missed
        side.learn(tokens, ms)

    def is_slower(self, sessions: int) -> bool:
        """Whether steps with the proposer have yielded fewer tokens in a millisecond than steps without."""
        sides = self._by_size.get(sessions.bit_length())
        if sides is None or min(sides.drafted.steps, sides.bare.steps) < _ENOUGH:
            return False
        return sides.drafted.tokens * sides.bare.ms < sides.bare.tokens * sides.drafted.ms

    def _sides(self, sessions: int) -> _Sides:
        return self._by_size.setdefault(sessions.bit_length(), _Sides())
