"""How the engine treats a draft source: when to leave the source alone, how long to wait, what to expect.

**Throttle.** A source that gains too little for a while rests: no session sends it progress for a number of
steps, then one session does for a few rounds, and the rest doubles each time that it gains too little again.
Accepted tokens that no better source had drafted are its gain (`speculative.marginal`). Rounds are counted
over all sessions, so short sessions find out together what none of them could alone. A source that is slow,
wrong or superfluous then costs next to nothing, and one that gets better is noticed.

**Latency.** Only a step with exactly one ready session may wait for a draft. A step that begins now yields
`expected` tokens in `step_ms`; a node that survives with probability s and comes in w ms is worth waiting for
while s / w > expected / step_ms.

**Presence.** How much a source slows steps down is measured (`source_presence.py`). The source has to save at
least as large a part of a session's rounds.

**Reputation.** What all sessions learnt about a source, for the sessions to come.

Knows rounds, tokens and the caller's milliseconds, nothing of queues, sessions or trees.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from outrider.wire.names import EDGE
from speculative.calibration import Calibration
from speculative.draft import MAX_DRAFT_NODES
from speculative.marginal import SourceGain
from speculative.params import SamplingParams
from speculative.policies.book import PolicyBook
from speculative.policies.local import LocalDrafts
from speculative.policies.names import DEFAULT_POLICY
from speculative.policies.policy import DraftLimits
from verifier_service.remote_sources.source_presence import SourcePresence

_FIRST_ROUNDS = 32.0
"""Rounds without a gain after which a source rests."""
LEAST_PRICE = 0.03
"""Rounds that a remote source has to save for each round that it is sent, whatever it was measured to cost:
its drafts are merged, and progress is sent to it."""
_PROBE_ROUNDS = 8.0
"""Rounds for which a resting source is tried again."""
_STAKE = 1.0
"""Time, in rounds, that a source may take from the target before it has to rest. A round that takes a third
of the target's speed, for instance, costs so much that few of them are tried."""
_CREDIT_ROUNDS = 16.0
"""Rounds, however dear, for which a source that has gained enough may then gain nothing: gains come in turns
with rounds that have none."""
_DEAREST = 8.0
"""The most that the weight of a round lengthens the first rest by."""
_PROBE_WEIGHT = 2.0
"""The most that a round of a trial counts for: a source that comes back has to catch up first."""
_FIRST_REST = 16
_MOST_REST = 256
_SPARED_REST = 64
"""The longest rest, in steps, of a source whose drafts were never admitted, or right where others were right
as well. The rest of the former also ends when the batch has shrunk to half: drafts may pay again."""
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
    """Rounds that were spent on the source and that its gain has not paid for, each by its weight. Below 0
    where the gain has paid for rounds to come."""
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

    @property
    def is_spared(self) -> bool:
        """Whether the source rests because steps admitted none of its nodes."""
        return self.resting and self._activity.crowd > 0

    @property
    def on_trial(self) -> bool:
        """Whether the source rests, or is tried after a rest and has not paid for it yet."""
        return self.resting or self._probed > 0

    def committed(
        self,
        saved: float,
        heard: bool = True,
        spared: bool = False,
        batch: int = 1,
        step: int = 0,
        *,
        price: float = LEAST_PRICE,
        right: bool = False,
    ) -> None:
        """A round of the session was committed.

        Args:
            saved: rounds that the source has saved; one for each committed token that no other had drafted.
            heard: whether the source had sent drafts. A silent source may still be reading a long prompt.
            spared: whether drafts were there, of any source, and the step admitted none of them.
            batch: sessions in the step.
            step: the step's number; 0: each call is a step of its own.
            price: rounds that the source has to save for each round that it is sent. The higher the price,
                the fewer rounds the source has for that.
            right: whether the source is often right, so that it gains nothing only where others are too.
        """
        # Drafts from before the rest end it only where they pay for as much as a trial would take.
        if self.resting and saved < _PROBE_ROUNDS * price:
            self._go_on_resting(batch, step)
        else:
            weight = max(1.0, price / (1.0 + price) * _FIRST_ROUNDS / _STAKE)
            self._pay(saved / price, weight)
            self._spend(heard, spared, right and price <= LEAST_PRICE, batch, weight)
        self._begins = False

    def _pay(self, rounds: float, weight: float) -> None:
        """Adds the rounds that a gain pays for; a source that has paid for the most is tried no longer.

        `weight` is how much a round counts for.
        """
        if rounds <= 0.0:
            return
        activity, most = self._activity, _most_left(weight)
        self.resting = False
        self._left = min(self._left + rounds * weight, most + weight)
        barren = min(activity.barren, _FIRST_ROUNDS) - rounds * weight
        activity.barren, activity.late = max(_FIRST_ROUNDS - most, barren), False
        if self._left >= _FIRST_ROUNDS:
            self._probed = 0
            activity.rest, activity.tried = 0, 0.0

    def _spend(self, heard: bool, spared: bool, right: bool, batch: int, weight: float) -> None:
        """Takes the round that was just committed from those that are left."""
        activity = self._activity
        counts = min(weight, _PROBE_WEIGHT) if self._probed else weight
        # Where sessions end before a slow source drafts, late drafts are all that ever comes of it.
        spent = max(_SPARED, counts) if spared and heard else counts * (heard or activity.late)
        activity.late = False
        self._left = min(_most_left(weight), self._left - spent)
        activity.barren += spent
        if self._probed:
            activity.tried += spent
        if self._left <= 0:
            self._rest(weight, _SPARED_REST if spared or right else _MOST_REST)
            self._follows = spared
            activity.crowd = batch if spared else 0

    def _rest(self, weight: float, most: int) -> None:
        rest = min(2 * self._probed or int(_FIRST_REST * min(weight, _DEAREST)), most)
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


def _most_left(weight: float) -> float:
    """The most that a session may have left to spend on a source, where a round counts for `weight`."""
    return max(_FIRST_ROUNDS, _CREDIT_ROUNDS * weight)


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
        """A token was committed where this source had drafted one; `hit`: it counts for this source."""
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


_MOST_IN_VAIN = 8
"""Waiting rounds in a row without an accepted token after which a session's rounds stop waiting."""
_SILENCE = 3
"""Rounds without an accepted token that a round without any draft counts for."""


class DraftWaits:
    """How long one session's rounds wait for drafts of the sources that asked for it.

    Remote sources ask for waits, because their sessions trade time for fewer passes of the target. After a
    source was silent or wrong for some rounds, rounds wait only once a token of its drafts is accepted again.
    """

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._held = False
        self._in_vain = 0

    @property
    def wanted(self) -> bool:
        """Whether any source asked rounds to wait."""
        return bool(self._asked)

    @property
    def ms(self) -> int:
        """Milliseconds after a round until the next round begins without a draft; 0: at once."""
        return max(self._asked.values(), default=0) if self._in_vain < _MOST_IN_VAIN else 0

    def asks(self, source_index: int) -> bool:
        """Whether this source asked rounds to wait."""
        return source_index in self._asked

    def ask(self, source_index: int, ms: int) -> None:
        """Sets how many milliseconds rounds wait for this source; 0 ends the waiting."""
        self._asked.pop(source_index, None)
        if ms:
            self._asked[source_index] = ms

    def held(self) -> None:
        """Notes that the next round is held back for a draft."""
        self._held = True

    def committed(self, token_sources: bytes, heard: Collection[int]) -> None:
        """Notes a committed round.

        Args:
            token_sources: source index of each committed token, 0 for the target itself.
            heard: source indices of the drafts that arrived since the round before.
        """
        if any(token_sources.count(source_index) for source_index in self._asked):
            self._in_vain = 0
        elif self._held:
            self._in_vain += _SILENCE if self._asked.keys().isdisjoint(heard) else 1
        self._held = False


_UNBOUNDED = DraftLimits(MAX_DRAFT_NODES, 0.0, MAX_DRAFT_NODES, MAX_DRAFT_NODES)
# Clients name sources, so their number has to be bounded; the oldest is forgotten.
_MOST = 512
_BAND = 0.4
K, V = TypeVar("K", bound=Hashable), TypeVar("V")
_BANDS = 3


@dataclass(frozen=True, slots=True)
class Reputation:
    """What is known of one source over earlier requests of one temperature band."""

    calibration: Calibration = field(default_factory=Calibration)
    gain: SourceGain = field(default_factory=SourceGain)


@dataclass(frozen=True, slots=True)
class AddressReputation:
    """What is known of the sources at one address, which hear of a session together or not at all."""

    activity: SourceActivity = field(default_factory=SourceActivity)
    presence: SourcePresence | None = None
    """What the sources cost the target, the same for all bands; None: for a client's device."""


class Reputations:
    """Reputations by source name and temperature band: sampling follows a copied token far less often.

    Sources at one address rest together, so what they cost and how they rest is known by all of their names.

    Args:
        policy: draft policy of the sources inside this worker, for requests that name none; empty: such
            sources offer all that they draft.

    Raises:
        InvalidRequest: there is no such policy.
    """

    def __init__(self, policy: str = "") -> None:
        self._policy = policy
        self._policies = PolicyBook(policy or DEFAULT_POLICY, _UNBOUNDED)
        self._known: dict[tuple[str, int], Reputation] = {}
        self._addresses: dict[tuple[tuple[str, ...], int], AddressReputation] = {}
        self._presences: dict[tuple[str, ...], SourcePresence] = {}
        self._lock = Lock()

    def of(self, name: str, params: SamplingParams) -> Reputation:
        """The source's reputation for requests with these parameters; from any thread.

        A client's device starts with a new reputation in each session, so devices do not affect each other's.
        """
        if name == EDGE:
            return Reputation()
        with self._lock:
            return _kept(self._known, (name, _band(params)), Reputation)

    def of_address(self, names: Sequence[str], params: SamplingParams) -> AddressReputation:
        """The reputation of the sources that one address has under these names; from any thread.

        As above, that of a client's device is new.
        """
        if EDGE in names:
            return AddressReputation()
        key = tuple(sorted(names))
        with self._lock:
            presence = _kept(self._presences, key, lambda: SourcePresence(key))
            return _kept(self._addresses, (key, _band(params)), lambda: AddressReputation(presence=presence))

    def local_drafts(self, policy: str, source: str) -> LocalDrafts | None:
        """What cuts the drafts of a source inside this worker for one session; None: nothing does.

        `policy` is the one that the session's request names; empty: the worker's own.
        """
        if not (policy or self._policy):
            return None
        return LocalDrafts(self._policies.open(policy, source))


def _band(params: SamplingParams) -> int:
    """The temperature band of a request: 0 for greedy ones."""
    return 0 if params.greedy else 1 + min(int(params.temperature / _BAND), _BANDS)


def _kept(known: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """The entry of this key, made if there is none; the oldest entry goes where there are too many."""
    if (found := known.get(key)) is None:
        if len(known) >= _MOST:
            del known[next(iter(known))]
        found = known[key] = make()
    return found
