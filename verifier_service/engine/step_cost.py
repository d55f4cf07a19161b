"""What a step costs, by its rows and sessions: a profile of the passes, corrected by what steps take.

A busy neighbour slows all sizes by one factor. That factor is learnt fast and changes no comparison between
sizes. Sizes are compared by pairs of successive steps only, which the neighbour slowed alike, so noise does
not make the choice of sizes swing. Without a profile the first requests would be served badly: the budget
weighs drafted nodes against what their rows cost. Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from outrider.lm.step_profile import StepProfile
from speculative.budget import FEW

_SCALE_WEIGHT = 0.2
_SIZE_WEIGHT = 0.05
"""Weight of what a pair of successive steps says about their sizes."""
_SIZES = 24  # powers of two of rows
_REFRESH = 32
"""Comparisons after which the expected times are worked out anew; a single one hardly moves them."""
_LEAST_MS = 1e-3
_FIRST_TABLE = 128
"""Least number of sizes whose times are worked out together."""
# A step that took this many times as long as expected was held up by something else.
_MOST_RATIO = 2.0

_KEPT = 0.98
"""Factor by which each step reduces the weight of earlier steps."""
_PRIOR_NODES = 1.0
"""Weight, in squared nodes, of the assumption that a node costs nothing."""
_FIRST_GAPS = 8
"""Gaps that are held until they can be told from interruptions. The first ones of a process load code and
caches and take ten times as long; if their time were the nodes', no node would be admitted that shows what
nodes take."""


class StepOverhead:
    """What the engine does between two forwards, in ms: for each session of the step, and for each node.

    Choosing tokens, building trees and bookkeeping take longer the more nodes a step verifies. Where a pass
    takes a few milliseconds, a node's share of this work costs as much as its row. The split is a weighted
    least squares fit of the gaps between forwards over the sessions and nodes of the steps. Until eight gaps
    are known, all their time is taken to be the sessions'.
    """

    __slots__ = (
        "_first",
        "_nodes_nodes",
        "_nodes_time",
        "_sessions_nodes",
        "_sessions_sessions",
        "_sessions_time",
    )

    def __init__(self) -> None:
        self._first: list[tuple[float, int, int]] = []
        """Milliseconds, sessions and nodes of the first gaps, until they are learnt from together."""
        self._sessions_sessions = self._sessions_nodes = self._nodes_nodes = 0.0
        self._sessions_time = self._nodes_time = 0.0

    def learn(self, milliseconds: float, sessions: int, nodes: int) -> None:
        """Learns from the gap behind a forward of `sessions` (at least 1) and `nodes` (scouts included)."""
        if self._sessions_sessions:
            known = self.session_ms * sessions + self.node_ms * nodes
            self._add(min(milliseconds, _MOST_RATIO * known) if known else milliseconds, sessions, nodes)
            return
        self._first.append((milliseconds, sessions, nodes))
        if len(self._first) == _FIRST_GAPS:
            most = _MOST_RATIO * self.session_ms
            for gap_ms, *counts in self._first:
                self._add(min(gap_ms, most * counts[0]), *counts)
            self._first.clear()

    def _add(self, milliseconds: float, sessions: int, nodes: int) -> None:
        self._sessions_sessions = _KEPT * self._sessions_sessions + sessions * sessions
        self._sessions_nodes = _KEPT * self._sessions_nodes + sessions * nodes
        self._nodes_nodes = _KEPT * self._nodes_nodes + nodes * nodes
        self._sessions_time = _KEPT * self._sessions_time + sessions * milliseconds
        self._nodes_time = _KEPT * self._nodes_time + nodes * milliseconds

    @property
    def node_ms(self) -> float:
        """What a further node adds; 0 where no step had nodes."""
        if not self._nodes_nodes:
            return 0.0
        across = self._sessions_nodes / self._sessions_sessions
        own = self._nodes_nodes + _PRIOR_NODES - across * self._sessions_nodes
        fitted = (self._nodes_time - across * self._sessions_time) / own
        # No more than where sessions cost nothing.
        return min(max(0.0, fitted), self._nodes_time / self._nodes_nodes)

    @property
    def session_ms(self) -> float:
        """What a further session adds, without drafted nodes; 0 where nothing is known."""
        if not self._sessions_sessions:
            # A low one: up to half of the first gaps may be held up.
            each = sorted([gap_ms / sessions for gap_ms, sessions, _ in self._first])
            return each[len(each) // 4] if each else 0.0
        left = self._sessions_time - self.node_ms * self._sessions_nodes
        return max(0.0, left / self._sessions_sessions)


class StepCostModel:
    """Expected duration of a step, in ms, by its rows, its sessions and how long their past is.

    Args:
        profile: measured ms of a step of one session, by its rows. Without a profile all sizes start out
            alike, so that larger ones are tried.
        session_ms: ms that each further session adds to a step of as many rows.
        depth: cached positions that the profile's rows attended over.
        deeper_ms: ms that each further cached position adds for each row.
    """

    __slots__ = (
        "_compared",
        "_corrected",
        "_correction",
        "_deeper_ms",
        "_depth",
        "_last",
        "_ms",
        "_overhead",
        "_profiled",
        "_rows",
        "_scale",
        "_session_ms",
    )

    def __init__(
        self,
        profile: Mapping[int, float] | None = None,
        session_ms: float = 0.0,
        depth: float = 0.0,
        deeper_ms: float = 0.0,
    ) -> None:
        self._overhead = StepOverhead()
        self.use(StepProfile(profile or {}, session_ms, depth, deeper_ms))

    @classmethod
    def of(cls, profile: StepProfile) -> "StepCostModel":
        """The model that a profile gives."""
        model = cls()
        model.use(profile)
        return model

    def use(self, profile: StepProfile) -> None:
        """Begins anew with the profile of another kind of passes; the costs between passes are kept."""
        points = sorted(profile.ms_by_rows.items())
        self._rows = np.array([rows for rows, _ in points])
        # No larger step is faster: where one was, its measurement was wrong.
        self._ms = np.maximum.accumulate(np.array([ms for _, ms in points], dtype=np.float64))
        self._session_ms = profile.session_ms
        self._depth = profile.depth
        self._deeper_ms = profile.deeper_ms
        self._scale: float | None = 1.0 if points else None
        self._correction = [1.0] * (_SIZES + 1)
        self._profiled = np.empty(0)
        """The profile's ms of one session's forward by its rows; as many sizes as were asked for."""
        self._corrected = np.empty(0)
        """The same as corrected by steps; out of date where it is empty."""
        self._compared = 0
        self._last: tuple[int, float] | None = None

    def record(self, rows: int, milliseconds: float, sessions: int = 1, depth: float = 0.0) -> None:
        """Learns from the forward of one step; arguments as for `expected_ms`."""
        extra = self._beside_ms(rows, sessions, depth) * (self._scale or 1.0)
        ratio = max(milliseconds - extra, _LEAST_MS) / float(self._profiled_ms(rows)[rows])
        if self._last is not None and self._last[0] != rows:
            self._compare(*self._last, rows, ratio)
        self._last = rows, ratio
        scale = ratio / self._correct(rows)
        known = self._scale or scale
        self._scale = known + _SCALE_WEIGHT * (min(scale, _MOST_RATIO * known) - known)

    @property
    def node_ms(self) -> float:
        """What a drafted node adds, in ms, to the work between two forwards; its row costs more on top."""
        return self._overhead.node_ms

    def record_overhead(self, milliseconds: float, sessions: int, nodes: int = 0) -> None:
        """Learns from the time between two forwards, in ms, that was not spent waiting.

        The forward before had `sessions` sessions with `nodes` drafted nodes and scouts.
        """
        self._overhead.learn(milliseconds, sessions, nodes)

    def expected_ms(self, rows: int, sessions: int = 1, depth: float = 0.0) -> float:
        """Expected ms of a forward of `rows` (at least 1) input tokens; 0 where no forward was ever seen.

        `depth` is the number of cached positions that a row attends over, on average.
        """
        if self._scale is None:
            return 0.0
        alone = float(self._alone_ms(rows)[rows])
        return (alone + self._beside_ms(rows, sessions, depth)) * self._scale

    def work(self, rows: int, sessions: int, depth: float, nodes: int) -> float:
        """What a step should take by its rows, in the profile's ms: nothing that slows all steps down counts.

        `nodes` of the rows are drafted nodes and scouts. 0 where no forward was ever seen.
        """
        if self._scale is None:
            return 0.0
        return (self.expected_ms(rows, sessions, depth) + self.node_ms * nodes) / self._scale

    def step_curve(self, sessions: int = 1, depth: float = 0.0) -> "StepCurve":
        """What steps take that differ in their rows alone; the curve holds until the next `record`.

        The work between forwards is that of steps without drafted nodes: add `node_ms` for each node.
        `depth` is the number of cached positions that a row attends over, on average.
        """
        overhead_ms = self._overhead.session_ms * sessions
        if self._scale is None:
            return StepCurve(lambda most: np.zeros(most + 1), overhead_ms or 1.0, 0.0, 1.0)
        fixed_ms = self._session_ms * (sessions - 1) * self._scale + overhead_ms
        row_ms = self._deeper_ms * max(0.0, depth - self._depth) * self._scale
        return StepCurve(self._alone_ms, fixed_ms, row_ms, self._scale)

    def _alone_ms(self, most: int) -> NDArray[np.float64]:
        """The corrected ms of one session's forward, by its rows, at least up to `most` rows."""
        if len(self._corrected) <= most:
            profiled = self._profiled_ms(most)
            exact = np.minimum(np.log2(_sizes(len(profiled))), _SIZES - 1e-9)
            low = exact.astype(np.int64)
            share, correction = exact - low, np.array(self._correction)
            self._corrected = profiled * (correction[low] * (1.0 - share) + correction[low + 1] * share)
        return self._corrected

    def _profiled_ms(self, most: int) -> NDArray[np.float64]:
        """The profile's ms by rows, at least up to `most`: linear between two points, and beyond the last."""
        if len(self._profiled) <= most:
            sizes = _sizes(max(most + 1, _FIRST_TABLE))
            self._profiled = np.full(len(sizes), self._ms[0] if len(self._ms) else 1.0)
            if len(self._rows) > 1:
                at = np.clip(np.searchsorted(self._rows, sizes, side="right"), 1, len(self._rows) - 1)
                low, high = self._rows[at - 1], self._rows[at]
                slope = (self._ms[at] - self._ms[at - 1]) / (high - low)
                self._profiled = np.maximum(self._ms[at - 1] + slope * (sizes - low), self._ms[0])
        return self._profiled

    def _beside_ms(self, rows: int, sessions: int, depth: float) -> float:
        """Ms that further sessions and a longer past add: the profile has one session and a short past."""
        return self._session_ms * (sessions - 1) + self._deeper_ms * rows * max(0.0, depth - self._depth)

    def _compare(self, rows_before: int, before: float, rows: int, now: float) -> None:
        """Corrects two sizes whose successive steps took `before` and `now` times the profile's ms."""
        self._compared += 1
        if self._compared % _REFRESH == 0:
            self._corrected = np.empty(0)
        off = (now / self._correct(rows)) / (before / self._correct(rows_before))
        learnt = _SIZE_WEIGHT * (min(max(off, 1 / _MOST_RATIO), _MOST_RATIO) - 1.0)
        for size, change in ((rows, learnt), (rows_before, -learnt)):
            low, share = _place(size)
            self._correction[low] *= 1.0 + change * (1.0 - share)
            self._correction[low + 1] *= 1.0 + change * share

    def _correct(self, rows: int) -> float:
        low, share = _place(rows)
        return self._correction[low] * (1.0 - share) + self._correction[low + 1] * share


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Expected ms of a forward and what lies between two of them, by the forward's rows; always above 0."""

    alone_ms: Callable[[int], NDArray[np.float64]]
    """Gives the ms of one session's forward by its rows, up to some size at least."""
    fixed_ms: float
    """ms that every size has on top."""
    row_ms: float
    """ms that each row has on top."""
    scale: float
    """Factor by which forwards take longer now."""

    def __call__(self, rows: int) -> float:
        """The ms of a step of `rows` input tokens, at least 1."""
        return float(self.alone_ms(rows)[rows]) * self.scale + self.row_ms * rows + self.fixed_ms

    def between(self, low: int, high: int) -> list[float] | NDArray[np.float64]:
        """The ms of steps of `low` up to `high - 1` rows; a list of few."""
        alone = self.alone_ms(high)[low:high]
        if high - low > FEW:
            return alone * self.scale + (self.row_ms * np.arange(low, high) + self.fixed_ms)
        scale, row_ms, fixed_ms = self.scale, self.row_ms, self.fixed_ms
        return [ms * scale + (row_ms * rows + fixed_ms) for rows, ms in enumerate(alone.tolist(), low)]


def _place(rows: int) -> tuple[int, float]:
    """The power of two at or below a size, and how far the size is towards the next, 0 to 1."""
    exact = min(log2(rows), _SIZES - 1e-9)
    return int(exact), exact - int(exact)


def _sizes(count: int) -> NDArray[np.int64]:
    """The numbers of rows from 0 to `count` - 1, with 1 in place of 0: no step has no rows."""
    sizes = np.arange(count)
    sizes[0] = 1
    return sizes
