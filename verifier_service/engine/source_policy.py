"""How the engine treats a draft source: how long to wait for it, and what to expect of it.

**Latency.** Only a step with exactly one ready session may wait for a draft. A step that begins now yields
`expected` tokens in `step_ms`; a node that survives with probability s and comes in w ms is worth waiting for
while s / w > expected / step_ms.

**Reputation.** What all sessions learnt about a source, for the sessions to come.

Knows rounds, tokens and the caller's milliseconds, nothing of queues or sessions.
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
from speculative.tree import ROOT, TokenTree
from verifier_service.proposers.own_text.record import SourceRecord
from verifier_service.remote_sources.source_presence import SourcePresence
from verifier_service.remote_sources.source_rests import SourceActivity

_WEIGHT = 0.15
# A source that sent nothing useful for this many rounds is silent, and no step waits for it.
_SILENT_ROUNDS = 3
_MAX_DOUBLINGS = 10
_SHORTEST_MS = 0.05
# Longer gaps are pauses between requests or a stopped peer, not a latency to learn.
_LONGEST_MS = 100.0

Key = TypeVar("Key", bound=Hashable)
Known = TypeVar("Known")


@dataclass(frozen=True, slots=True)
class StepValue:
    """The yield of a step that would begin now."""

    expected: float
    """Tokens that it commits on average: 1 and the survival of every node that it would admit."""
    step_ms: float
    """Its expected duration in ms; 0 where that is not known yet."""
    leaf: float
    """Survival of the path that the next node would continue; 1 where nothing is drafted."""

    @classmethod
    def of(cls, tree: TokenTree, step_ms: float, *, is_full: bool) -> "StepValue":
        """The yield of a step with this tree; where the tree `is_full`, no further node would be admitted."""
        leaf, survival = ROOT, 1.0
        while leaf + 1 < len(tree) and tree.parents[leaf + 1] == leaf:
            leaf += 1
            survival = tree.survival[leaf]
        return cls(1.0 + sum(tree.survival), step_ms, 0.0 if is_full else survival)


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

    def keep_only(self, source_indices: Collection[int]) -> None:
        """Ends the waiting for all sources but these."""
        self._asked = {index: ms for index, ms in self._asked.items() if index in source_indices}

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
# Clients name sources, so their number has to be bounded; a source that is in use is not forgotten.
_MOST = 512
_BAND = 0.4
_BANDS = 3


@dataclass(frozen=True, slots=True)
class Reputation:
    """What is known of one source over earlier requests of one temperature band."""

    calibration: Calibration = field(default_factory=Calibration)
    gain: SourceGain = field(default_factory=SourceGain)
    record: SourceRecord = field(default_factory=SourceRecord)
    """What the source saved, if it drafts from a session's own text inside this worker."""


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

    def resting(self, name: str) -> dict[str, bool]:
        """Whether a source rests, for "greedy" and "sampled" requests if such have used it; any thread."""
        found: dict[str, bool] = {}
        with self._lock:
            for (names, band), known in self._addresses.items():
                if name in names:
                    sampling = "sampled" if band else "greedy"
                    found[sampling] = found.get(sampling, False) or known.activity.rest > 0
        return found

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


def _kept(known: dict[Key, Known], key: Key, make: Callable[[], Known]) -> Known:
    """The entry of this key, made if there is none; where there are too many, the one unused longest goes."""
    found = known.pop(key, None)
    if found is None:
        if len(known) >= _MOST:
            del known[next(iter(known))]
        found = make()
    known[key] = found
    return found
