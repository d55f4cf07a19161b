"""Which drafted nodes a step admits: those that are worth their rows, at what steps of this target take.

The arithmetic is `speculative.budget`; here the step's cost comes in. Pure: knows counts and milliseconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from speculative.budget import allot, least_survival, may_pay
from verifier_service.engine.step_cost import StepCostModel

Taking = Sequence[tuple[int, int]]
"""For each session in a step: its uncomputed ids, and how many of them the step computes."""

LEAST_GAIN = 0.08
"""The share of a step that drafting costs beside it: merging drafts, sending progress, processors shared with
the target. Where nodes promise a smaller gain, none is admitted, and the sources come to rest."""
_CROWD = 4
"""The fewest sessions of a step that may go without looking for drafts."""
_BARREN = 4
"""Steps in a row that admit none of the drafts that they found, before steps stop looking for drafts."""
_FIRST_REST, _LONGEST_REST = 4, 16
"""Length of the first and of the longest rest, in steps; each rest has twice the length of the last."""
_LEAST_MS = 1e-3
_MORE = 8
_WEIGHT = 0.1
"""Weight of one step in the running mean of the survival that nodes need."""
_DOUBT = 0.3
"""Factor by which a source may underestimate its nodes and still be asked for them."""
_KEPT_STEPS = 16
"""Number of alike steps for which one answer to whether nodes could pay is used."""


class DecodingCost:
    """Cost of decoding in a step, in ms, by the step's rows.

    `prefilled` rows are prompts', which have to be computed in any case, so decoding costs what it adds to
    them. If the whole step were counted, long steps would seem to call for many drafted nodes, which would
    delay the prompts and save no step.

    Args:
        costs: what steps take.
        bare: rows of the step without drafted nodes.
        prefilled: rows of the step that are prompts'.
        sessions: sessions in the step.
        depth: number of cached positions that a row attends over, on average.
    """

    def __init__(
        self, costs: StepCostModel, bare: int, prefilled: int, sessions: int, depth: float = 0.0
    ) -> None:
        self._bare, self._node_ms = bare, costs.node_ms
        self._prompts_ms = costs.expected_ms(prefilled, depth=depth) if prefilled else 0.0
        self._curve = costs.step_curve(sessions, depth)

    def __call__(self, rows: int) -> float:
        """The cost in a step of `rows` rows, at least those of the step without drafted nodes."""
        step_ms = self._curve(rows) + self._node_ms * (rows - self._bare)
        return max(step_ms - self._prompts_ms, _LEAST_MS) if self._prompts_ms else step_ms

    def between(self, low: int, high: int) -> list[float] | NDArray[np.float64]:
        """The cost in steps of `low` up to `high - 1` rows; a list of few."""
        step_ms, node_ms, nodes = self._curve.between(low, high), self._node_ms, low - self._bare
        if not isinstance(step_ms, list):
            step_ms = step_ms + node_ms * np.arange(nodes, nodes + high - low)
            return np.maximum(step_ms - self._prompts_ms, _LEAST_MS) if self._prompts_ms else step_ms
        step_ms = [ms + node_ms * count for count, ms in enumerate(step_ms, nodes)]
        return [max(ms - self._prompts_ms, _LEAST_MS) for ms in step_ms] if self._prompts_ms else step_ms


class StepYield(NamedTuple):
    """What a step yields, and what one more row of it is worth."""

    tokens_per_ms: float
    row_worth: float
    """Tokens that the step yields in the time that one more drafted node takes."""


class DraftRests:
    """Decides which steps do not look for drafts, because steps of as many sessions admitted none.

    To look for drafts costs each session of a step about as much as to choose its token. In a crowd whose
    rows are dear, that time is lost unless the likeliest nodes pay. A few sessions have little to lose.
    """

    def __init__(self) -> None:
        self._barren = 0
        """Steps in a row that found drafts and admitted none."""
        self._left = 0
        """Steps of the present rest that are left."""
        self._next = _FIRST_REST
        self._crowd = 0
        """Number of sessions in the steps that admitted none."""

    def asks(self, sessions: int) -> bool:
        """Whether a step of this many sessions looks for drafts; to be called once per step."""
        if not self._left or sessions < _CROWD or 2 * sessions <= self._crowd:
            self._left = 0
            return True
        self._left -= 1
        return False

    def learn(self, sessions: int, found: int, admitted: int) -> None:
        """Notes how many nodes a step that looked for drafts has found and admitted."""
        if admitted:
            self._barren, self._next = 0, _FIRST_REST
        elif found and sessions >= _CROWD:
            self._barren += 1
            if self._barren >= _BARREN:
                self._left, self._next = self._next, min(2 * self._next, _LONGEST_REST)
                self._crowd, self._barren = sessions, _BARREN - 1


class DraftBudget:
    """Admits a step's drafted nodes by what steps of this target take.

    Args:
        costs: what steps take.
        adaptive: False admits every drafted node that there is room for.
        most_rows: the most rows of a step that has drafted nodes; None: any number.
    """

    def __init__(self, costs: StepCostModel, adaptive: bool, most_rows: int | None = None) -> None:
        self._costs = costs
        self._adaptive = adaptive
        self._most_rows = most_rows
        self._needed = 0.0
        self._rests = DraftRests()
        self._may_pay = False
        """Whether drafted nodes could pay in a step like the last."""
        self._known_for = 0, 0, 0
        """Sessions that commit, rows and most nodes of the steps for which that is known."""
        self._known_steps = 0
        """Number of further steps for which that is taken as known."""
        self._bare_needs = 0.0
        """Survival that the first drafted node needs in such a step."""

    @property
    def least_survival(self) -> float:
        """Survival that a node needs, by its source's estimate, to have a chance in steps like the last."""
        return _DOUBT * self.node_cost

    @property
    def node_cost(self) -> float:
        """Cost of one more row in steps like the last, in tokens that the time would otherwise yield."""
        return min(1.0, self._needed)

    @property
    def first_needs(self) -> float:
        """Survival that the first drafted node needs to pay for its row, in the step asked about last."""
        return self._bare_needs

    def asks_for_drafts(self, taking: Taking, most: Sequence[int], depth: float = 0.0) -> bool:
        """Whether the step looks for drafts, of at most `most` nodes for each session; call once per step.

        A step that could admit none does not look, nor does a step like earlier steps that admitted none
        (`DraftRests`). `depth` is the number of cached positions that a row attends over, on average.
        """
        if not self._adaptive:
            return True
        if not self._rests.asks(len(taking)):
            return False
        nodes = sum(
            count for (uncomputed, rows), count in zip(taking, most, strict=True) if rows == uncomputed
        )
        return nodes > 0 and self._could_pay(nodes, taking, depth)

    def _could_pay(self, nodes: int, taking: Taking, depth: float) -> bool:
        """Whether as many nodes could pay; not worked out in every step, as the answer seldom changes."""
        alike = *_counted(taking), nodes
        if not self._known_steps or alike != self._known_for:
            committing, rows, cost = self._bare(taking, depth)
            self._may_pay = may_pay(nodes, committing, rows, cost)
            self._bare_needs = least_survival(committing, rows, cost, _MORE)
            self._known_for, self._known_steps = alike, _KEPT_STEPS
        self._known_steps -= 1
        return self._may_pay

    def yield_of(self, taking: Taking, survivals: Sequence[float], depth: float = 0.0) -> StepYield:
        """What the step yields with drafted nodes of these survivals.

        A proposer's time lengthens the whole step, prompts included; a node competes with decoding alone. A
        budget that admits every node asks no worth of its row. Nothing is asked before a step was measured.
        """
        committing, bare, cost = self._bare(taking, depth)
        rows = bare + len(survivals)
        if not self._costs.expected_ms(rows):
            return StepYield(0.0, 0.0)
        tokens = committing + sum(survivals)
        step_ms = self._costs.step_curve(len(taking), depth)(rows) + self._costs.node_ms * len(survivals)
        row_ms = (cost(rows + _MORE) - cost(rows)) / _MORE if self._adaptive else 0.0
        return StepYield(tokens / step_ms, row_ms * tokens / cost(rows))

    def admit(
        self,
        rankings: Sequence[Sequence[float]],
        taking: Taking,
        depth: float = 0.0,
        *,
        held_back: int = 0,
    ) -> list[int]:
        """Number of nodes that the step admits of each session's ranking (survivals, descending).

        `held_back` is the number of drafts that were not ranked, as their nodes are worth less than a row.
        """
        most = sum(map(len, rankings))
        if self._most_rows is not None and most > (room := self._most_rows - sum(size for _, size in taking)):
            rankings = _likeliest(rankings, max(0, room))
            most = sum(map(len, rankings))
        if not self._adaptive or not rankings:  # without rankings: all sessions of the step have ended
            return [len(ranking) for ranking in rankings]
        if not most:
            self._rests.learn(len(taking), held_back, 0)
            self._learn_from_bare(taking, depth)
            return [0] * len(rankings)
        committing, rows, cost = self._bare(taking, depth)
        counts = allot(rankings, committing, cost.between(rows, rows + most + 1), LEAST_GAIN)
        self._rests.learn(len(taking), most + held_back, sum(counts))
        if committing:
            admitted = [ranking[:count] for ranking, count in zip(rankings, counts, strict=True)]
            expected = committing + sum(map(sum, admitted))
            self._learn(least_survival(expected, rows + sum(counts), cost, _MORE))
        return counts

    def _learn_from_bare(self, taking: Taking, depth: float) -> None:
        """Learns what nodes need from a step without any; a step that looked for drafts knows that."""
        committing, rows, asked = self._known_for
        if not asked or (committing, rows) != _counted(taking):
            self._could_pay(0, taking, depth)
        if self._known_for[0]:
            self._learn(self._bare_needs)

    def _learn(self, needed: float) -> None:
        self._needed += _WEIGHT * (needed - self._needed)

    def _bare(self, taking: Taking, depth: float) -> tuple[int, int, DecodingCost]:
        """For the step without drafts: sessions that commit, rows, and the cost of decoding."""
        committing, rows = _counted(taking)
        cost = DecodingCost(self._costs, rows, rows - committing, len(taking), depth)
        return committing, rows, cost


def _likeliest(rankings: Sequence[Sequence[float]], room: int) -> list[Sequence[float]]:
    """The beginnings of these rankings (survivals, descending) that hold the `room` likeliest nodes."""
    ordered = sorted([(-survival, index) for index, ranking in enumerate(rankings) for survival in ranking])
    counts = [0] * len(rankings)
    for _, index in ordered[:room]:
        counts[index] += 1
    return [ranking[:count] for ranking, count in zip(rankings, counts, strict=True)]


def _counted(taking: Taking) -> tuple[int, int]:
    """Sessions of a step that commit a token, and its rows without drafts."""
    committing = rows = 0
    for uncomputed, size in taking:
        committing += uncomputed == size
        rows += size
    return committing, rows
