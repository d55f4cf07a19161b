"""How the engine treats a draft source: when to leave the source alone, how long to wait, what to expect.

**Throttle.** A source none of whose drafts was accepted for a while rests: no session sends it progress for a
number of steps, then one session does for a few rounds, and the rest doubles each time that nothing is
accepted. Rounds are counted over all sessions, so short sessions find out together what none of them could
alone. A source that is slow or wrong then costs next to nothing, and one that gets better is noticed.

**Latency.** Only a step with exactly one ready session may wait for a draft. A step that begins now yields
`expected` tokens in `step_ms`; a node that survives with probability s and comes in w ms is worth waiting for
while s / w > expected / step_ms.

**Reputation.** What all sessions learnt about a source, for the sessions to come.

Knows rounds, tokens and the caller's milliseconds, nothing of queues, sessions or trees.
"""

from dataclasses import dataclass, field
from threading import Lock

from speculative.calibration import Calibration
from speculative.params import SamplingParams

_FIRST_ROUNDS = 32.0
"""Rounds without an accepted token after which a source rests."""
_PROBE_ROUNDS = 8.0
"""Rounds for which a resting source is tried again."""
_FIRST_REST = 16
_MOST_REST = 256
_SPARED_REST = 64
"""The longest rest, in steps, of a source whose drafts were never admitted. It also ends when the batch has
shrunk to half: drafts may pay again."""
_SPARED = 8.0
"""A round in which there were drafts and none was admitted counts as this many: such a batch has no use for
them."""


@dataclass(slots=True)
class SourceActivity:
    """Counts of one source over all sessions, and how long it rests."""

    rest: int = 0
    """Steps that the current rest lasts; 0: the source does not rest."""
    left: int = 0
    """Steps of the rest that remain until a session tries the source again."""
    step: int = 0
    """Number of the last step that was counted."""
    barren: float = 0.0
    """Rounds since a token of the source was accepted."""
    tried: float = 0.0
    """Rounds in which sessions have tried the source since its last rest began."""
    crowd: int = 0
    """Sessions in the step that admitted none of its drafts; 0: it rests because its drafts were wrong."""
    late: bool = False
    """Whether the source sent drafts for a session that had ended. Set by the reader of its stream."""


class SourceThrottle:
    """Decides whether one source is sent the progress of one session.

    Args:
        activity: the source's, over all sessions; updated here.
    """

    __slots__ = ("_activity", "_begins", "_follows", "_left", "_probed", "resting")

    def __init__(self, activity: SourceActivity) -> None:
        self._activity = activity
        self.resting = activity.rest > 0
        """Whether the source is left alone: it is not sent the round that was committed last."""
        # Each session has some rounds of its own to try the source, unless all are too short for that.
        fewest = min(_PROBE_ROUNDS, 2 * _FIRST_ROUNDS - activity.barren)
        self._left = max(1.0, fewest, _FIRST_ROUNDS - activity.barren)
        self._probed = 0
        """Length, in steps, of the rest that this session has ended to try the source."""
        self._follows = self.resting
        """Whether the source rests because of what other sessions found."""
        self._begins = True
        """Whether this is the session's first round."""

    def committed(
        self, accepted: int, heard: bool = True, spared: bool = False, batch: int = 1, step: int = 0
    ) -> None:
        """A round of the session was committed.

        Args:
            accepted: committed tokens that were this source's.
            heard: whether the source had sent drafts. A silent source may still be reading a long prompt.
            spared: whether drafts were there, of any source, and the step admitted none of them.
            batch: sessions in the step.
            step: the step's number; 0: each call is a step of its own.
        """
        activity = self._activity
        if accepted:
            self.resting, self._left, self._probed = False, _FIRST_ROUNDS, 0
            activity.rest, activity.barren, activity.tried, activity.late = 0, 0.0, 0.0, False
        elif self.resting:
            self._go_on_resting(batch, step)
        else:
            # Where sessions end before a slow source drafts, late drafts are all that ever comes of it.
            spent = _SPARED if spared and heard else float(heard or activity.late)
            activity.late = False
            self._left -= spent
            activity.barren += spent
            if self._probed:
                activity.tried += spent
            if self._left <= 0:
                self._rest(_SPARED_REST if spared else _MOST_REST)
                self._follows = spared
                activity.crowd = batch if spared else 0
        self._begins = False

    def _rest(self, most: int) -> None:
        rest = min(2 * self._probed or _FIRST_REST, most)
        self._activity.rest = max(self._activity.rest, rest) if not self._probed else rest
        self._activity.left = self._activity.rest
        self._activity.tried = 0.0
        self._left = rest
        self.resting = True

    def _go_on_resting(self, batch: int, step: int) -> None:
        activity = self._activity
        self._left -= 1
        if not step or step != activity.step:
            activity.step = step
            activity.left -= 1
        # While the source does not rest for all sessions, this session's own count decides.
        # A session in its first round tries the source a little before the rest is over: most older sessions
        # are about to end, and would find out nothing.
        soon = _PROBE_ROUNDS if self._begins else 0.0
        due = activity.left <= soon if activity.rest else self._follows or self._left <= 0
        if due or 2 * batch <= activity.crowd:
            self.resting, self._follows = False, False
            activity.crowd = 0
            self._left, self._probed = max(1.0, _PROBE_ROUNDS - activity.tried), activity.rest
            activity.left = activity.rest


_WEIGHT = 0.15
# A source that sent nothing useful for this many rounds is silent, and no step waits for it.
_SILENT_ROUNDS = 3
_MAX_DOUBLINGS = 10
_SHORTEST_MS = 0.05
# Longer gaps are pauses between requests or a stopped peer, not a latency to learn.
_LONGEST_MS = 100.0


@dataclass(frozen=True, slots=True)
class StepValue:
    """The yield of a step that would begin now."""

    expected: float
    """Tokens that it commits on average: 1 and the survival of every node that it would admit."""
    step_ms: float
    """Its expected duration in ms; 0 where that is not known yet."""
    leaf: float
    """Survival of the path that the next node would continue; 1 where nothing is drafted."""


@dataclass(slots=True)
class SourceLatency:
    """How fast and how well one remote source drafts for a session. Times are ms on the caller's clock."""

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
        """Whether no step is to wait for the source now."""
        return self._skip > 0 or self._silent_rounds >= _SILENT_ROUNDS

    def committed(self, now: float, bare: bool) -> None:
        """A round was published; `bare`: no drafted node outlived it."""
        self._committed_at = now
        self._bare = bare
        self._silent_rounds += 1
        self._skip = max(0, self._skip - 1)

    def arrived(self, at: float) -> None:
        """A draft came in at the time `at`, and at least one of its nodes was kept."""
        since = at - (self._committed_at if self._bare else self._arrived_at)
        if 0.0 <= since <= _LONGEST_MS:
            if self._bare:
                self._first_ms = _learn(self._first_ms, since)
            else:
                self._interval_ms = _learn(self._interval_ms, since)
        self._arrived_at = at
        self._bare = False
        self._silent_rounds = 0

    def verified(self, hit: bool) -> None:
        """The target chose a token where this source had drafted one; `hit`: it was the drafted token."""
        self.acceptance += _WEIGHT * (hit - self.acceptance)

    def waited(self, fruitful: bool) -> None:
        """A wait for this source ended; a fruitless one doubles the rounds until the next wait."""
        if fruitful:
            self._fruitless = 0
            return
        self._skip = 2 << min(self._fruitless, _MAX_DOUBLINGS)
        self._fruitless += 1

    def patience_ms(self, now: float, value: StepValue, most_ms: float) -> float:
        """Milliseconds, up to `most_ms`, for which this source's next node is worth a wait; 0: begin now."""
        if self.silent or value.step_ms <= 0.0:
            return 0.0
        typical = self._first_ms if self._bare else self._interval_ms
        if typical is None:
            return 0.0
        left = (self._committed_at if self._bare else self._arrived_at) + typical - now
        if left <= 0.0:
            # Overdue: likely to take as long again as it is overdue; given up at twice its usual time.
            left = typical / 2 - left if -left < typical else most_ms + 1.0
        left = max(left, _SHORTEST_MS)
        worth = value.leaf * self.acceptance / left > value.expected / value.step_ms
        return left if worth and left <= most_ms else 0.0


def _learn(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)


# Clients name sources, so their number has to be bounded; the oldest is forgotten.
_MOST = 512
_BAND = 0.4
_BANDS = 3


@dataclass(frozen=True, slots=True)
class Reputation:
    """Calibration of one source over earlier requests of one temperature band."""

    calibration: Calibration = field(default_factory=Calibration)
    activity: SourceActivity = field(default_factory=SourceActivity)


class Reputations:
    """Reputations by source name and temperature band: sampling follows a copied token far less often."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Reputation] = {}
        self._lock = Lock()

    def of(self, name: str, params: SamplingParams) -> Reputation:
        """The source's reputation for requests with these parameters; from any thread."""
        band = 0 if params.greedy else 1 + min(int(params.temperature / _BAND), _BANDS)
        with self._lock:
            found = self._known.get((name, band))
            if found is None:
                if len(self._known) >= _MOST:
                    del self._known[next(iter(self._known))]
                found = self._known[name, band] = Reputation()
            return found
