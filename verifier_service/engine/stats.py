"""The engine's statistics: totals, counts by source, histograms of times, and the clock of steps.

Knows nothing of metrics. One thread at a time writes an instance; any may read it.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.stalls.awake_clock import AwakeClock
from speculative.choice import ChoiceCounts
from speculative.fragment import Offer
from verifier_service.engine.step_cost import StepCostModel

LAST_PLACE = 16
"""The last place of a path with a count of its own; later places count there as well."""


def _no_places() -> NDArray[np.int64]:
    # Of a fixed size, because other threads read the counts at any time.
    return np.zeros(LAST_PLACE + 1, np.int64)


@dataclass(slots=True)
class SourceCounts:
    """Counts of the drafts of one source since the worker started."""

    offered: int = 0
    """Nodes offered."""
    kept: int = 0
    """Offered nodes that were new in their session's pool."""
    stale: int = 0
    """Offered nodes off the committed path, of an older epoch, or of a session that ended."""
    waiting: int = 0
    """Offered nodes whose base was not known when they came."""
    duplicate: int = 0
    """Offered nodes that the pool had already."""
    refused: int = 0
    """Offered nodes beyond a bound of their session's pool."""
    admitted: int = 0
    """Nodes that the target computed."""
    accepted: int = 0
    """Nodes delivered as tokens."""
    own: int = 0
    """Nodes delivered as tokens that no better source had drafted."""
    accepted_at: NDArray[np.int64] = field(default_factory=_no_places, compare=False)
    """Nodes delivered as tokens, by place on the round's path: int64[LAST_PLACE + 1]."""
    flooded: int = 0
    """Drafts dropped unread because too many came at once."""
    malformed: int = 0
    """Malformed drafts: no correct source sends them."""
    muted: int = 0
    """Sessions that no longer listen to the source, after a malformed draft."""
    unfollowed: int = 0
    """Sessions that the source refused to follow."""

    def offer(self, nodes: int, offer: Offer) -> None:
        """Counts one draft of `nodes` nodes, and what became of them."""
        self.offered += nodes
        self.kept += offer.kept
        if offer.kept < nodes:
            self.stale += offer.stale
            self.waiting += offer.unanchored
            self.duplicate += offer.duplicate
            self.refused += offer.refused

    def accept(self, place: int) -> None:
        """Counts a node that was delivered as a token, at a place of the round's path from 0."""
        self.accepted += 1
        self.accepted_at[min(place, LAST_PLACE)] += 1

    def plus(self, other: "SourceCounts") -> "SourceCounts":
        """The sum of these counts and others."""
        return SourceCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


OTHER = "other"
MOST_NAMES = 64


class CountsByName(dict[str, SourceCounts]):
    """Source counts by source name, made when asked for.

    Clients name sources, so names beyond MOST_NAMES are counted together, as OTHER.
    """

    def __missing__(self, name: str) -> SourceCounts:
        if len(self) >= MOST_NAMES and name != OTHER:
            return self[OTHER]
        counts = self[name] = SourceCounts()
        return counts


@dataclass(slots=True)
class EngineTotals:
    """Counts and times of the engine since it started."""

    steps: int = 0
    """Forward calls: one per step."""
    rows: int = 0
    """Input tokens of all forward calls."""
    scouts: int = 0
    """Scouts that forward calls computed: input tokens that could never be accepted."""
    choices: ChoiceCounts = field(default_factory=ChoiceCounts)
    """Tokens chosen, and those that took a whole row of logits, by reason."""
    rounds: int = 0
    committed: int = 0
    preempted: int = 0
    """Times that a session gave its keys and values up to older sessions, to be computed again."""
    waits: int = 0
    """Steps that waited for a draft."""
    failed_sessions: int = 0
    drafted_rounds: int = 0
    """Rounds that brought at least one drafted node."""


_CAPACITY = 4096
BUCKETS_MS = (
    *(0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
    *(12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0),
)
"""Upper bounds of the histogram's buckets, in ms."""


class Samples:
    """A series of durations in ms: a histogram of all, and the last few thousand exactly."""

    __slots__ = ("_capacity", "_last", "_next", "bounds", "buckets", "total_ms")

    def __init__(self, capacity: int = _CAPACITY, bounds: tuple[float, ...] = BUCKETS_MS) -> None:
        self.bounds = bounds
        """Upper bounds of the buckets, in ms."""
        self.buckets = [0] * (len(bounds) + 1)
        """Number of values in each bucket; the last bucket is open."""
        self.total_ms = 0.0
        self._capacity = capacity
        self._last: list[float] = []
        self._next = 0

    def add(self, value: float) -> None:
        """Adds a value, which pushes the oldest of the last `capacity` out."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total_ms += value
        if len(self._last) < self._capacity:
            self._last.append(value)
        else:
            self._last[self._next] = value
            self._next = (self._next + 1) % self._capacity

    def quantile(self, share: float) -> float:
        """The value that `share` of the last do not exceed (nearest rank). Raises ValueError if empty."""
        values = sorted(self._last.copy())
        if not values:
            raise ValueError("no value has been added yet")
        return values[min(len(values) - 1, int(share * len(values)))]

    def __len__(self) -> int:
        return len(self._last)


class Timings:
    """Durations of the parts of steps: forward, sampling, proposing, waiting for drafts, and the split.

    Proposing is the time of batched proposers, in steps that ask one. The split of a step is the wall time
    between the previous step's forward and its own, less sampling, proposing and waiting. Splits are kept by
    the number of sessions in the step.
    """

    __slots__ = ("forward", "proposing", "sampling", "split", "waiting")

    def __init__(self) -> None:
        self.forward = Samples()
        self.sampling = Samples()
        self.proposing = Samples()
        self.waiting = Samples()
        self.split: dict[int, Samples] = {}

    def add_split(self, sessions: int, milliseconds: float) -> None:
        """Adds the split of a step with `sessions` sessions."""
        if sessions not in self.split:
            # Copied, so that a reader's loop over it never sees it grow.
            self.split = self.split | {sessions: Samples()}
        self.split[sessions].add(milliseconds)


BOUNDS_MS = (
    *(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1e3, 2e3, 4e3, 8e3),
    *(16e3, 32e3, 64e3, 128e3, 256e3, 512e3),
)
"""Upper bounds of the histograms' buckets, in ms."""

QUEUED, READING, DECODING = range(3)


class Phases:
    """How long sessions are queued, read their prompts and decode: histograms since the start."""

    __slots__ = ("_at", "decode", "prefill", "queue")

    def __init__(self) -> None:
        self.queue = Samples(bounds=BOUNDS_MS)
        """Durations from Open until the session's first pass can be planned."""
        self.prefill = Samples(bounds=BOUNDS_MS)
        """Durations from there to the end of the session's first round."""
        self.decode = Samples(bounds=BOUNDS_MS)
        """Durations from there to the session's end."""
        self._at: dict[int, tuple[int, float]] = {}

    def opened(self, handle: int, now_s: float) -> None:
        """Notes that the session was queued."""
        self._at[handle] = (QUEUED, now_s)

    def began(self, handle: int, now_s: float) -> None:
        """The session has memory. One that gave its memory up and has it again stays in its phase."""
        self._move(handle, QUEUED, READING, self.queue, now_s)

    def committed(self, handle: int, now_s: float) -> None:
        """Notes that the session had a round."""
        if self._at.get(handle, (DECODING, 0.0))[0] == READING:
            self._move(handle, READING, DECODING, self.prefill, now_s)

    def ended(self, handle: int, now_s: float) -> None:
        """The session ended, or was parked."""
        phase, since_s = self._at.pop(handle, (QUEUED, 0.0))
        if phase == DECODING:
            self.decode.add((now_s - since_s) * 1000)

    def _move(self, handle: int, phase: int, to: int, samples: Samples, now_s: float) -> None:
        at = self._at.get(handle)
        if at is not None and at[0] == phase:
            samples.add((now_s - at[1]) * 1000)
            self._at[handle] = (to, now_s)


class PassTimes(NamedTuple):
    """When a forward ran, in seconds."""

    began_s: float
    ended_s: float
    waited_s: float = 0.0
    """Seconds for which the step was held back for drafts before."""


class StepClock:
    """Measures the engine's thread, from one forward to the next, in seconds of time.perf_counter.

    Args:
        timings: get the duration of every step's parts.
        costs: learns what steps take.
        awake: measures calls of proposers.
    """

    def __init__(self, timings: Timings, costs: StepCostModel, awake: AwakeClock | None = None) -> None:
        self.began = 0.0
        """When the last forward began."""
        self.ended: float | None = None
        """When the last forward ended; None: it failed, or the engine has been idle since."""
        self.waited = 0.0
        """Seconds that the last forward's step waited for drafts."""
        self._timings = timings
        self._costs = costs
        self._awake = awake or AwakeClock()
        self._sampling = self._waiting = self._proposing = 0.0
        self._computed = (1, 0)
        """Sessions of the last forward, and drafted nodes and scouts."""
        # Taking in drafts and commands is no part of what one more session or node costs.
        self._taking_in = 0.0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Measures the choice of tokens."""
        began = time.perf_counter()
        yield
        self._sampling += time.perf_counter() - began

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """Measures batched proposers, which pay for their time with tokens (see `ProposerPrice`)."""
        began = time.perf_counter()
        yield
        self._proposing += time.perf_counter() - began

    def now_s(self) -> float:
        """The time, in seconds."""
        return time.perf_counter()

    def awake_s(self) -> float:
        """Seconds for which the process ran."""
        return self._awake.awake_s()

    @contextmanager
    def taking_in(self) -> Iterator[None]:
        """Measures the taking in of drafts and commands."""
        began = time.perf_counter()
        yield
        self._taking_in += time.perf_counter() - began

    def waited_for_drafts(self, seconds: float) -> None:
        """The step was held back so long for drafts."""
        self._waiting += seconds
        self._timings.waiting.add(seconds * 1000)

    def pause(self) -> None:
        """The time from the last forward to the next is no part of a step."""
        self.ended = None

    def begin(self, sessions: int) -> None:
        """The forward of a step with `sessions` sessions begins."""
        self.began, self.waited = time.perf_counter(), self._waiting
        if self.ended is not None:
            between = self.began - self.ended - self._waiting - self._proposing
            if self._proposing:
                self._timings.proposing.add(self._proposing * 1000)
            self._timings.sampling.add(self._sampling * 1000)
            self._timings.add_split(sessions, (between - self._sampling) * 1000)
            gap_ms = max(0.0, between - self._taking_in) * 1000
            self._costs.record_overhead(gap_ms, *self._computed)
        self._sampling = self._waiting = self._taking_in = self._proposing = 0.0

    def end(self, rows: int, sessions: int, depth: float, nodes: int = 0) -> PassTimes:
        """The forward of `rows` input tokens, which attend over `depth` positions on average, has ended.

        `nodes` of the rows are drafted nodes and scouts.
        """
        self.ended = time.perf_counter()
        self._computed = sessions, nodes
        forward_ms = (self.ended - self.began) * 1000
        self._costs.record(rows, forward_ms, sessions, depth)
        self._timings.forward.add(forward_ms)
        return PassTimes(self.began, self.ended, self.waited)


class StepMeter(Protocol):
    """Measures the time that a step spends inside the core, which reads no clock itself."""

    def sampling(self) -> AbstractContextManager[None]:
        """Entered while tokens are chosen."""

    def taking_in(self) -> AbstractContextManager[None]:
        """Entered while proposers draft."""

    def proposing(self) -> AbstractContextManager[None]:
        """Entered while batched proposers draft, and while they are shown what a pass did."""

    def waited_for_drafts(self, seconds: float) -> None:
        """Records that a step was held back so long for drafts."""

    def now_s(self) -> float:
        """The time, in seconds."""

    def awake_s(self) -> float:
        """Seconds for which the process ran: by these calls of proposers are judged."""


class Unmeasured:
    """The StepMeter of a caller that measures nothing."""

    def sampling(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def taking_in(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def proposing(self) -> AbstractContextManager[None]:
        """Measures nothing."""
        return nullcontext()

    def waited_for_drafts(self, seconds: float) -> None:
        """Records nothing."""

    def now_s(self) -> float:
        """Always the same time."""
        return 0.0

    def awake_s(self) -> float:
        """The same as `now_s`."""
        return self.now_s()
