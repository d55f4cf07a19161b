"""Whether one more level of a batched proposer's drafts is worth its milliseconds. Pure.

Several proposers often draft the same tokens. Only what a proposer adds to the drafts that are there already
counts as its gain, as `speculative.marginal` measures it for sources of every kind.
"""

import math
from dataclasses import dataclass, field

from verifier_service.proposers.measured_gain import MeasuredGain
from verifier_service.remote_sources.source_rests import REST_GROWTH, longest_rest

_WEIGHT = 0.1
"""Weight of one call in the running means."""
_FASTER = 0.3
"""Weight of a call faster than the mean: first calls and calls that other work interrupts are slower."""
_LEAST_MS = 0.05
_FIRST_REST, _MOST_REST = 16, 1024
"""Steps of the first and of the longest rest of a proposer or a level that did not pay for its time. Where
steps are quick, a proposer may rest longer: trials would cost a few per cent of the time otherwise."""
_LONG_REST = 256
"""Least length, in steps, of a long rest: what the proposer would have to be shown until then, to draft for a
session that runs now, costs more than such a session gains."""
_PROVEN = 32
"""Steps in a row that a proposer or a level has to pay for before its next rest is a short one again."""
_TRIES = 4
"""Steps that try a proposer or a level at first and after a rest, regardless of earlier steps."""


def _mean_ms(mean_ms: float, ms: float) -> float:
    """The running mean with one more time; a time that an interruption made long counts as twice the mean."""
    if ms < mean_ms:
        return mean_ms + _FASTER * (ms - mean_ms)
    return mean_ms + _WEIGHT * (min(ms, 2 * mean_ms + _LEAST_MS) - mean_ms)


@dataclass(slots=True)
class MeanMs:
    """Running means of a call's milliseconds, by how many sessions the call served: 1, 2 or 3, 4 to 7, ..."""

    _by_size: dict[int, float] = field(default_factory=dict)

    def learn(self, sessions: int, ms: float) -> None:
        """Learns from a call for this many sessions."""
        size = sessions.bit_length()
        known = self._by_size.get(size)
        self._by_size[size] = ms if known is None else _mean_ms(known, ms)

    def of(self, sessions: int) -> float:
        """The mean for this many sessions, or for the nearest number that is known; 0 without any."""
        size = sessions.bit_length()
        if size not in self._by_size:
            if not self._by_size:
                return 0.0
            size = min(self._by_size, key=lambda known: (abs(known - size), known))
        return self._by_size[size]


@dataclass(slots=True)
class _Trials:
    """Decides when a proposer or a level that does not pay is tried again."""

    left: int = _TRIES
    rest: int = 0
    """Steps of the present rest that are left."""
    next_rest: int = _FIRST_REST
    paid: int = 0
    """Steps in a row that paid."""

    def asks(self, pays: bool, may_try: bool = True, longest: int = _MOST_REST) -> bool:
        """Whether to ask the proposer in this step; call once per step. A trial waits until it `may_try`.

        A rest that begins has at most `longest` steps.
        """
        if self.rest:
            self.rest -= 1
            return False
        if self.left:
            self.left -= may_try
            return may_try
        if pays:
            self.paid += 1
            if self.paid >= _PROVEN:
                self.next_rest = _FIRST_REST
            return True
        self.rest, self.left, self.paid = min(self.next_rest, longest), _TRIES, 0
        self.next_rest = REST_GROWTH * self.rest
        return False

    def shorten(self, longest: int) -> None:
        """Bounds what is left of a rest: it may have begun where steps were quicker than they are now."""
        self.rest = min(self.rest, longest)


@dataclass(slots=True)
class _Level:
    """Running means over the calls that computed one level."""

    gain: float
    """Tokens that the level added for one session: its nodes' survival less the worth of their rows."""
    ms: MeanMs = field(default_factory=MeanMs)
    trials: _Trials = field(default_factory=_Trials)


@dataclass(slots=True)
class ProposerPrice:
    """What the levels of one proposer's drafts cost, and how many tokens they gain net of rows."""

    _levels: list[_Level] = field(default_factory=list)
    own: float = 1.0
    """Part of the right drafts that no other source had, which is set before each step (0 to 1)."""
    measured: MeasuredGain = field(default_factory=MeasuredGain)
    """Steps with the proposer beside steps without: learns from each step."""
    seeing: MeanMs = field(default_factory=MeanMs)
    """What it costs to show a pass to the proposer; prices of one proposer share this."""
    _trials: _Trials = field(default_factory=_Trials)
    _behind: bool = False
    """Whether the proposer was just left out: its next call makes up for the rounds that it missed."""

    @property
    def rests(self) -> bool:
        """Whether the proposer is left out for now."""
        return self.rest_left > 0

    @property
    def rest_left(self) -> int:
        """Steps of this kind until the proposer is tried again; 0 if it does not rest."""
        return self._trials.rest

    @property
    def rests_long(self) -> bool:
        """Whether the proposer rests because trial after trial has failed."""
        return self._trials.rest > 0 and self._trials.next_rest > _LONG_REST

    @property
    def is_tried(self) -> bool:
        """Whether the proposer would be asked next to find out whether it pays."""
        return not self._trials.rest and self._trials.left > 0

    def rest_on(self, steps: int) -> None:
        """Shortens the proposer's rest by steps of this kind that have passed, down to one step."""
        self._behind = True
        self._trials.rest = max(1, self._trials.rest - steps)

    def bound_rest(self, sessions: int) -> None:
        """Shortens a rest that began in quicker steps than those of `sessions` sessions are."""
        self._trials.shorten(self._longest_rest(sessions))

    def gain_per_ms(self, sessions: int) -> float:
        """Tokens that drafts for these sessions gain in a millisecond; infinite if not known yet."""
        if not self._levels:
            return math.inf
        spent_ms = self.seeing.of(sessions) + sum(level.ms.of(sessions) for level in self._levels)
        return sessions * sum(level.gain for level in self._levels) / max(_LEAST_MS, spent_ms)

    def begins(self, sessions: int, tokens_per_ms: float, may_try: bool = True) -> bool:
        """Whether this step asks the proposer at all; to be called once per step.

        `tokens_per_ms` is what the step yields without this proposer; 0: not known yet. Where it must not
        try, a proposer that is on trial has to wait.
        """
        if self.rests:
            self._behind = True
            self.bound_rest(sessions)
            return self._trials.asks(pays=False)
        measured = self.measured
        pays = not measured.is_slower(sessions) and (
            measured.is_faster(sessions) or self.pays(0, sessions, tokens_per_ms)
        )
        longest = self._longest_rest(sessions)
        asks = self._trials.asks(pays, may_try, longest) and not self.measured.leaves_out(sessions)
        self._behind |= not asks
        return asks

    def _longest_rest(self, sessions: int) -> int:
        """The most steps of a rest, by how long steps without the proposer take."""
        return longest_rest(_MOST_REST, self.measured.bare_ms(sessions))

    def deepens(self, level: int, sessions: int, tokens_per_ms: float, before: float | None) -> bool:
        """Whether this step asks for level number `level`, from 1; call once per step and level."""
        pays = self.pays(level, sessions, tokens_per_ms, before)
        return level >= len(self._levels) or self._levels[level].trials.asks(pays)

    def pays(self, level: int, sessions: int, tokens_per_ms: float, before: float | None = None) -> bool:
        """Whether level number `level`, from 0, is expected to gain more tokens than its time is worth.

        A level that does not pay by itself still pays as the way to deeper levels that do. `before` is what
        the level above it has just gained over all sessions.
        """
        if level >= len(self._levels):
            return True  # nothing is known of it
        scale = self.own * sessions
        if before is not None and self._levels[level - 1].gain > 0:
            scale = self.own * before / self._levels[level - 1].gain
        surplus = 0.0 if level else -self.seeing.of(sessions) * tokens_per_ms
        for known in self._levels[level:]:
            surplus += known.gain * scale - known.ms.of(sessions) * tokens_per_ms
            if surplus > 0:
                return True
        return False

    def computed(self, level: int, ms: float, gain: float, sessions: int) -> None:
        """Learns from a level that was computed in `ms` and gained `gain` tokens over all sessions."""
        if level == len(self._levels):
            self._levels.append(_Level(gain / sessions))
        known = self._levels[level]
        known.gain += _WEIGHT * (gain / sessions - known.gain)
        if level or not self._behind:
            known.ms.learn(sessions, ms)
        else:
            self._behind = False


@dataclass(slots=True)
class ProposerPrices:
    """The prices of one proposer by kind of step: what pays for greedy text may not pay for sampled text.

    A step that samples for one session or more is a sampled step.
    """

    _known: dict[str, ProposerPrice] = field(default_factory=dict)
    _seeing: MeanMs = field(default_factory=MeanMs)

    def of(self, greedy: bool) -> ProposerPrice:
        """The price for steps whose requests are all greedy, or for the others."""
        sampling = "greedy" if greedy else "sampled"
        if sampling not in self._known:
            self._known[sampling] = ProposerPrice(seeing=self._seeing)
        return self._known[sampling]

    def known(self, greedy: bool) -> ProposerPrice | None:
        """As `of`, but None if there was no such step."""
        return self._known.get("greedy" if greedy else "sampled")

    def rests(self, greedy: bool) -> bool:
        """Whether the proposer is left out of steps of this kind."""
        price = self.known(greedy)
        return price is not None and price.rests

    @property
    def rests_long(self) -> bool:
        """Whether trial after trial has failed, for all kinds of steps that there were."""
        return bool(self._known) and all(price.rests_long for price in self._known.values())

    @property
    def resting(self) -> dict[str, bool]:
        """Whether the proposer is left out, for the kinds of steps that there were: "greedy", "sampled"."""
        return {sampling: price.rests for sampling, price in self._known.copy().items()}

    @property
    def rest_left(self) -> int:
        """Steps until the proposer is tried again, at least; 0 if it does not rest for one kind of steps."""
        return min((price.rest_left for price in self._known.values()), default=0)

    def saw(self, ms: float, sessions: int) -> None:
        """Learns from a pass over these sessions that was shown in `ms`."""
        self._seeing.learn(sessions, ms)
