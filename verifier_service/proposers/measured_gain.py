"""Whether a proposer's drafts make steps yield tokens faster: measured, not estimated. Pure.

Estimates of a proposer's gain rest on the survival that the proposer states and on the times of steps of
other sizes. The comparison of whole steps shows where such estimates mislead. Now and then a few steps
leave the proposer out, so that both sides are measured under the same conditions.

Tokens of a step scatter by about as much as their mean. So the means of tokens count for many steps, and
the difference of the two rates is judged by its standard error. Times scatter little, but drift with the
machine's other work, so their means count for few steps.
"""

from dataclasses import dataclass, field
from math import log, sqrt

_MOST_STEPS = 100.0
"""Steps that the mean of tokens counts for, at most."""
_MOST_TIMES = 25.0
"""Steps that the mean of times counts for, at most: the machine's other work may change at any time."""
_REMEMBERED = 8.0
"""Steps that past times count for, at most, once steps of one side follow steps of the other. After a rest,
past tokens with the proposer count for no more steps, since the text may be another one."""
_LONG_GAP = 16
"""More steps in a row without the proposer are a rest."""
_LEAST_DOUBT = 0.01**2
"""Least squared standard error of the difference: steps that were all alike show no smaller difference."""
_CLEAR = 0.8
"""Standard errors by which the rates of steps with the proposer and without have to differ to decide."""
_SURE = 2.0
"""Standard errors by which steps with the proposer have to be faster to be compared more seldom."""
_DOUBTFUL_SPELL, _LONGEST_SPELL = 32, 256
"""The most steps with the proposer before some leave it out, in doubt and where it clearly gains."""
_ENOUGH = 8
"""Steps of each side before they are compared."""
_FIRST_SPELL = 4
"""Steps with the proposer before the first steps without: a short answer has to show whether it pays."""
_LEFT_OUT = 6
"""Steps in a row that leave the proposer out. The first does not count: the proposer is shown its pass."""


@dataclass(slots=True)
class TrialSpells:
    """When a few steps in a row leave a source out, so that they can be compared with steps that have it."""

    spell: int
    """Steps with the source before some leave it out."""
    steps: int
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
        if self._had >= min(self.spell, self.longest) and not self._left_out:
            self._left_out = self.steps
            self._had, self.spell = 0, min(self.growth * self.spell, self.longest)
        if self._left_out:
            self._left_out -= 1
            return True
        return False

    @property
    def goes_on(self) -> bool:
        """Whether the next step leaves the source out, as the step before did."""
        return self._left_out > 0

    def had_source(self, urgency: int = 1) -> None:
        """Notes a step that had the source; where the trial is urgent, the step counts as several."""
        self._had += urgency

    def put_off(self) -> None:
        """Begins the spell anew: both sides were just compared anyway."""
        self._had = 0


@dataclass(slots=True)
class _Mean:
    """A running mean, its variance, and how many values it counts for."""

    most: float
    """The most values that it counts for."""
    count: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def learn(self, value: float) -> None:
        """Learns from one value."""
        self.count = min(self.count + 1, self.most)
        off = value - self.mean
        self.mean += off / self.count
        self.variance += (off * (value - self.mean) - self.variance) / self.count

    def fade(self, count: float) -> None:
        """Has the mean count for at most `count` values, so that values to come outweigh those before."""
        self.count = min(self.count, count)

    @property
    def doubt(self) -> float:
        """Squared standard error of the mean, as a part of the mean."""
        return self.variance / (self.count * self.mean**2)


@dataclass(slots=True)
class _StepRate:
    """Running means of steps."""

    steps: int = 0
    tokens: _Mean = field(default_factory=lambda: _Mean(_MOST_STEPS))
    ms: _Mean = field(default_factory=lambda: _Mean(_MOST_TIMES))

    def learn(self, tokens: int, ms: float) -> None:
        """Learns from one step; a time that an interruption made long counts as twice the mean."""
        self.steps += 1
        self.tokens.learn(tokens)
        self.ms.learn(min(ms, 2 * self.ms.mean) if self.ms.mean else ms)

    @property
    def tokens_per_ms(self) -> float:
        """The rate of these steps."""
        return self.tokens.mean / self.ms.mean

    @property
    def doubt(self) -> float:
        """Squared standard error of the rate, as a part of the rate."""
        return self.tokens.doubt + self.ms.doubt


@dataclass(slots=True)
class _Sides:
    """Steps of about one number of sessions, with the proposer and without."""

    drafted: _StepRate = field(default_factory=_StepRate)
    bare: _StepRate = field(default_factory=_StepRate)
    spells: TrialSpells = field(default_factory=lambda: TrialSpells(_FIRST_SPELL, _LEFT_OUT))
    last: bool = False
    """Whether the last step had the proposer."""
    since: int = 0
    """Steps of that side in a row."""

    @property
    def gain(self) -> float:
        """How much faster steps with the proposer are, in standard errors; 0 where too few are known."""
        drafted, bare = self.drafted, self.bare
        if min(drafted.steps, bare.steps) < _ENOUGH:
            return 0.0
        doubt = drafted.doubt + bare.doubt
        return log(drafted.tokens_per_ms / bare.tokens_per_ms) / sqrt(max(doubt, _LEAST_DOUBT))


@dataclass(slots=True)
class MeasuredGain:
    """Compares steps with and without one proposer, by their sessions: 1, 2 or 3, 4 to 7, ..."""

    _by_size: dict[int, _Sides] = field(default_factory=dict)

    def leaves_out(self, sessions: int) -> bool:
        """Whether a step that would ask the proposer leaves it out; to be called once per such step."""
        sides = self._sides(sessions)
        sides.spells.longest = _LONGEST_SPELL if sides.gain > _SURE else _DOUBTFUL_SPELL
        return sides.spells.leaves_out()

    def goes_on_without(self, sessions: int) -> bool:
        """Whether the next step of `sessions` sessions leaves the proposer out, as the step before did."""
        sides = self._by_size.get(sessions.bit_length())
        return sides is not None and sides.spells.goes_on

    def learn(self, sessions: int, asked: bool, tokens: int, ms: float) -> None:
        """Learns from a step of these sessions that committed `tokens` tokens in `ms`, above 0.

        A step without tokens, all of whose sessions failed, says nothing.
        """
        if not tokens:
            return
        sides = self._sides(sessions)
        switched, sides.last = asked != sides.last, asked
        side = sides.drafted if asked else sides.bare
        if switched:
            side.ms.fade(_REMEMBERED)
            if asked and sides.since > _LONG_GAP:
                side.tokens.fade(_REMEMBERED)
            sides.since = 0
        sides.since += 1
        if asked:
            sides.spells.had_source()
            if switched:
                return  # the call makes up for the rounds that the proposer missed
        side.learn(tokens, ms)

    def is_slower(self, sessions: int) -> bool:
        """Whether steps with the proposer have clearly yielded fewer tokens in a millisecond than others.

        Tokens of a step scatter, so a small difference is clear only once many steps show it.
        """
        return self._gain(sessions) < -_CLEAR

    def is_faster(self, sessions: int) -> bool:
        """Whether steps with the proposer have clearly yielded more tokens in a millisecond than others."""
        return self._gain(sessions) > _CLEAR

    def bare_ms(self, sessions: int) -> float:
        """Mean ms of steps without the proposer; 0: none is known."""
        sides = self._by_size.get(sessions.bit_length())
        return 0.0 if sides is None else sides.bare.ms.mean

    def _gain(self, sessions: int) -> float:
        sides = self._by_size.get(sessions.bit_length())
        return 0.0 if sides is None else sides.gain

    def _sides(self, sessions: int) -> _Sides:
        return self._by_size.setdefault(sessions.bit_length(), _Sides())
