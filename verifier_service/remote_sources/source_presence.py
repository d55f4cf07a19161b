"""What it costs the target that a source outside the worker drafts: measured on whole steps. Pure.

A drafter on the target's machine takes processors and memory from the target, and its drafts take the
engine's time. No estimate knows how much. So steps in which sessions send the source their progress are
compared with steps in which none does: then the source soon has nothing to compute. Now and then all sessions
leave the source alone for a few steps to make such steps.

Compared are the few steps before such a change with the few behind it, since the machine's other work may
change at any time. Compared is how long they take for their rows, not how many tokens they commit: that
differs more between two texts than any source could change it. Each session weighs what the source costs
every step against the rounds that the source saved this session (`SourceThrottle`).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from verifier_service.proposers.measured_gain import TrialSpells

_SETTLING = 2
"""Steps after a change that are not compared: the source computes what it has been sent, or catches up."""
_COMPARED = 4
"""Steps before a change and behind it that are compared."""
_FIRST_SPELL, _LONGEST_SPELL, _GROWTH = 24, 1024, 4
"""Steps with the source before some leave it alone, and the factor by which they grow each time."""
_URGENCY = 4
"""Steps that a step counts for where the source saves little: an answer of a hundred tokens is to gain by
what a comparison shows. A source that saves much would hardly have to rest, and answers would lose by being
without it."""
_MUCH = 0.4
"""Rounds saved for each round that is sent from which a source saves much."""
_FIRST_SAVED, _SAVED_WEIGHT = 0.5, 0.15
"""What a source is taken to save before anything is known of that, and the weight of one round."""
_ENOUGH = 2
"""Comparisons before they count: a trial has two, one as it begins and one as it ends."""
_LEAST_WEIGHT = 0.3
"""Least weight of one comparison in the running mean."""
_PRIOR = 0.15
"""Part of the speed that a source is taken to cost until it has been compared."""
_WEIGHT = 0.1
"""Weight of one step in the running mean of a source's followers."""
_MOST = 32
"""Sources that are compared; the one known longest is forgotten."""


@dataclass(slots=True)
class _Comparisons:
    """What steps of about one number of sessions lost by the source."""

    spells: TrialSpells = field(
        default_factory=lambda: TrialSpells(_FIRST_SPELL, _SETTLING + _COMPARED, _LONGEST_SPELL, _GROWTH)
    )
    count: int = 0
    loss: float = 0.0
    """Running mean; below 0 where steps with the source were faster, by chance."""

    def learn(self, followed: list[float], alone: list[float]) -> None:
        """Learns from ms per work of a few steps with the source and a few without."""
        self.spells.put_off()
        self.count += 1
        weight = max(_LEAST_WEIGHT, 1 / self.count)
        self.loss += weight * (1.0 - median(alone) / median(followed) - self.loss)


@dataclass(slots=True, eq=False)
class SourcePresence:
    """Steps with the sources at one address beside steps without; `source` below means all of them."""

    names: tuple[str, ...]
    paused: bool = False
    """Whether all sessions leave the source alone for the comparison."""
    _saved: float = _FIRST_SAVED
    """Running mean of the rounds that the source saves a session in a round."""
    _followers: float = 1.0
    """Running mean of the sessions in a step that send the source their progress."""
    _by_size: dict[int, _Comparisons] = field(default_factory=dict)
    """By the number of sessions: 1, 2 or 3, 4 to 7, ..."""
    _kind: tuple[int, bool] = (0, False)
    """Size of the last step, and whether the source was followed."""
    _before: list[float] = field(default_factory=list)
    """ms per work of the steps before the last change."""
    _since: deque[float] = field(default_factory=lambda: deque(maxlen=_COMPARED))
    """ms per work of the last steps since."""
    _settling: int = 0

    def measured(self, sessions: int) -> float | None:
        """The part of its speed that a step of `sessions` sessions loses by the source; None: not known."""
        known = self._by_size.get(sessions.bit_length())
        return None if known is None or known.count < _ENOUGH else max(0.0, known.loss)

    def loss(self, sessions: int) -> float:
        """The same, with a guess where steps are compared and too few have been; 0 where none is."""
        if (measured := self.measured(sessions)) is not None:
            return measured
        return _PRIOR if sessions.bit_length() in self._by_size else 0.0

    def cost(self, sessions: int) -> float:
        """The part of its rounds that the source has to save each session that uses it, 0 to 1.

        The source slows down every session of a step, and saves rounds for those that use it.
        """
        return min(1.0, self.loss(sessions) * sessions / min(self._followers, sessions))

    def saved(self, rounds: float) -> None:
        """Notes how many rounds the source saved a session in a round for which it had drafted."""
        self._saved += _SAVED_WEIGHT * (rounds - self._saved)

    def pause(self, sessions: int) -> bool:
        """Decides whether the next step, of `sessions` sessions, leaves the source alone; once per step.

        A pause begins behind steps that it can be compared with.
        """
        comparable = self._kind == (sessions.bit_length(), True) and len(self._since) == _COMPARED
        self.paused = (self.paused or comparable) and self._sized(sessions).spells.leaves_out()
        return self.paused

    def stepped(self, sessions: int, followers: int, work: float, ms: float) -> None:
        """Learns from a step in which `followers` of the sessions sent the source their progress.

        A step without `work` or `ms` cannot be compared, and nor can steps before it with steps behind it.
        """
        kind, before = (sessions.bit_length(), followers > 0), self._kind
        if not followers and kind == before and work > 0 < ms and not (self._before or self._settling):
            self._since.append(ms / work)  # as below; most steps have sources that rest on
            return
        self._kind = kind
        if followers:
            self._followers += _WEIGHT * (followers - self._followers)
        if not (work > 0 and ms > 0):
            self._begin([])
            return
        if followers:
            self._sized(sessions).spells.had_source(1 if self._saved > _MUCH else _URGENCY)
        if kind != before:
            enough = kind[0] == before[0] and len(self._since) == _COMPARED
            self._begin([*self._since] if enough else [])
        if self._settling:
            self._settling -= 1
            return
        self._since.append(ms / work)
        if self._before and len(self._since) == _COMPARED:
            since = [*self._since]
            sides = (since, self._before) if followers else (self._before, since)
            self._sized(sessions).learn(*sides)
            self._before = []

    def _begin(self, before: list[float]) -> None:
        self._before, self._settling = before, _SETTLING
        self._since.clear()

    def _sized(self, sessions: int) -> _Comparisons:
        return self._by_size.setdefault(sessions.bit_length(), _Comparisons())


class PresenceTrials:
    """Measures the sources of one worker, and leaves one at a time alone."""

    def __init__(self) -> None:
        self._known: dict[SourcePresence, None] = {}
        self._trial: SourcePresence | None = None
        self._ended_s: float | None = None

    @property
    def known(self) -> tuple[SourcePresence, ...]:
        """The sources that are compared; from any thread."""
        return tuple(self._known)

    def idle(self) -> None:
        """The time until the next step ends is not what that step takes."""
        self._ended_s = None

    def stepped(
        self, now_s: float, sessions: int, uses: Iterable[tuple[SourcePresence, bool]], work: float
    ) -> None:
        """Notes a step that ends now, and decides which source the next step leaves alone.

        Args:
            now_s: the time, in seconds.
            sessions: number of sessions in the step.
            uses: for each session and source that it uses: the source, and whether the session sent it the
                last round.
            work: what the step should take by its rows, in any unit that is the same for all steps; 0: the
                step is not compared.
        """
        ms = 0.0 if self._ended_s is None else 1000 * (now_s - self._ended_s)
        self._ended_s = now_s
        followers: dict[SourcePresence, int] = {}
        for presence, follows in uses:
            followers[presence] = followers.get(presence, 0) + follows
        self._meet(followers)
        for presence in self._known:
            presence.stepped(sessions, followers.get(presence, 0), work, ms)
            self._try(presence, sessions, used=presence in followers)

    def _meet(self, users: Iterable[SourcePresence]) -> None:
        for presence in users:
            self._known.setdefault(presence)
        for presence in list(self._known)[: max(0, len(self._known) - _MOST)]:
            self._try(presence, 1, used=False)
            del self._known[presence]

    def _try(self, presence: SourcePresence, sessions: int, *, used: bool) -> None:
        """Leaves the source alone in the next step if its time has come and no other source's trial is on."""
        if self._trial not in (None, presence):
            return
        if used:
            self._trial = presence if presence.pause(sessions) else None
        else:
            presence.paused, self._trial = False, None
