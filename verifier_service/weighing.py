"""Whether drafted nodes are worth their rows in a step, and how many. Pure: knows counts and milliseconds."""

from collections.abc import Sequence

from speculative.budget import StepCost, allot, least_survival, may_pay
from verifier_service.pace import StepPace

Taking = Sequence[tuple[int, int]]
"""Of each session in a step: its pending ids, and the rows of them that the step computes."""

LEAST_GAIN = 0.08
"""What drafting costs beside a step: taking drafts in, telling sources, processors that they share with the
target. Where nodes promise less than that, nothing is admitted, and the sources come to rest."""
_LEAST_MS = 1e-3
_MORE = 8
_WEIGHT = 0.1
"""Of one step in what nodes need to be admitted."""
_DOUBT = 0.3
"""A source may be so much less sure of its nodes than they are worth."""


class Weighing:
    """Weighs a step's drafts by what steps of this target take.

    Args:
        adaptive: otherwise everything that was drafted is admitted.
    """

    def __init__(self, pace: StepPace, adaptive: bool) -> None:
        self._pace = pace
        self._adaptive = adaptive
        self._needed = 0.0

    @property
    def least_survival(self) -> float:
        """What a source's nodes need by its own estimate to have a chance in steps such as the last ones."""
        return _DOUBT * min(1.0, self._needed)

    def may_pay(self, taking: Taking, most: Sequence[int], depth: float = 0.0) -> bool:
        """Whether there could be drafts that the step admits, of at most so many nodes each; else nobody need
        look for any. `depth` is how many cached positions its rows attend over, on average."""
        if not self._adaptive:
            return True
        nodes = sum(count for (pending, rows), count in zip(taking, most, strict=True) if rows == pending)
        return may_pay(nodes, *self._bare(taking, depth))

    def admit(self, rankings: Sequence[Sequence[float]], taking: Taking, depth: float = 0.0) -> list[int]:
        """How many nodes of each session's ranking (survivals, descending) the step computes."""
        if not self._adaptive or not rankings:  # whoever was to be in the step may have gone
            return [len(ranking) for ranking in rankings]
        committing, rows, cost = self._bare(taking, depth)
        counts = allot(rankings, committing, rows, cost, LEAST_GAIN)
        if committing:
            admitted = [ranking[:count] for ranking, count in zip(rankings, counts, strict=True)]
            expected = committing + sum(map(sum, admitted))
            needed = least_survival(expected, rows + sum(counts), cost, _MORE)
            self._needed += _WEIGHT * (needed - self._needed)
        return counts

    def _bare(self, taking: Taking, depth: float) -> tuple[int, int, StepCost]:
        """Of the step without drafts: sessions that commit, rows, and what decoding costs in it."""
        rows = sum(size for _, size in taking)
        committing = sum(pending == size for pending, size in taking)
        return committing, rows, step_cost(self._pace, rows - committing, len(taking), depth)


def step_cost(pace: StepPace, prefilled: int, sessions: int, depth: float = 0.0) -> StepCost:
    """Milliseconds that a step of so many rows takes for decoding.

    Of its rows `prefilled` are prompts', which have to be computed in any case: in such a step decoding costs
    what it adds to them. Counted as a whole, long steps would seem to call for many drafted nodes, which make
    the prompts take longer and save no step.
    """
    prompts_ms = pace.expected_ms(prefilled, depth=depth) if prefilled else 0.0
    return lambda rows: max(pace.step_ms(rows, sessions, depth) - prompts_ms, _LEAST_MS)
