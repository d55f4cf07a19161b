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
_FIRST_SPELL = 4
"""Steps with the proposer before the first steps without: a short answer has to show whether it pays."""


@dataclass(slots=True)
class TrialSpells:
    """When a few steps in a row leave a source out, so that they can be compared with steps that have it."""

    spell: int
    """Steps with the source before some leave it out."""
    steps: int = 4
    """Steps in a row that leave the source out."""
    longest: int = 256
    """The most steps with the source before some leave it out."""
    growth: int = 2
    """Factor by which the steps before grow each time."""
    _had: int = 0
    """Steps with the source since some left it out."""
    _left_out: int = 0
    """Steps that are yet to leave the source out."""

    def leaves_out(self) -> bool:
        """Whether a step that would have the source leaves it out; to be called once per such step."""
        if self._had >= self.spell and not self._left_out:
            self._left_out = self.steps
            self._had, self.spell = 0, min(self.growth * self.spell, self.longest)
        if self._left_out:
            self._left_out -= 1
            return True
        return False

    def had_source(self, urgency: int = 1) -> None:
        """Notes a step that had the source; where the trial is urgent, the step counts as several."""
        self._had += urgency

    def put_off(self) -> None:
        """Begins the spell anew: both sides were just compared anyway."""
        self._had = 0


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
    spells: TrialSpells = field(default_factory=lambda: TrialSpells(_FIRST_SPELL))
    last: bool = False
    """Whether the last step had the proposer."""


@dataclass(slots=True)
class MeasuredGain:
    """Compares steps with and without one proposer, by their sessions: 1, 2 or 3, 4 to 7, ..."""

    _by_size: dict[int, _Sides] = field(default_factory=dict)

    def leaves_out(self, sessions: int) -> bool:
        """Whether a step that would ask the proposer leaves it out; to be called once per such step."""
        return self._sides(sessions).spells.leaves_out()

    def learn(self, sessions: int, asked: bool, tokens: int, ms: float) -> None:
        """Learns from a step of these sessions that committed `tokens` tokens in `ms`, above 0."""
        sides = self._sides(sessions)
        switched, sides.last = asked != sides.last, asked
        side = sides.drafted if asked else sides.bare
        if switched:
            side.fade()
        if asked:
            sides.spells.had_source()
            if switched:
                return  # the call makes up for the rounds that the proposer missed
        side.learn(tokens, ms)

    def is_slower(self, sessions: int) -> bool:
        """Whether steps with the proposer have yielded fewer tokens in a millisecond than steps without."""
        sides = self._by_size.get(sessions.bit_length())
        if sides is None or min(sides.drafted.steps, sides.bare.steps) < _ENOUGH:
            return False
        return sides.drafted.tokens * sides.bare.ms < sides.bare.tokens * sides.drafted.ms

    def bare_ms(self, sessions: int) -> float:
        """Mean ms of steps without the proposer; 0: none is known."""
        sides = self._by_size.get(sessions.bit_length())
        return 0.0 if sides is None else sides.bare.ms

    def _sides(self, sessions: int) -> _Sides:
        return self._by_size.setdefault(sessions.bit_length(), _Sides())
