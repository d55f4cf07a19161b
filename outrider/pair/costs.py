"""Measures the time of passes of two models on this machine, in turn."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM

_CONTEXT = 128
_LEAST, _MOST = 3, 100
"""Least and most repeats of a measurement, within the time budget."""
_BUDGET_S = 3.0
TARGET_ROWS = 17
"""Rows of a target's measured pass: the last committed token and sixteen nodes."""
DRAFTER_ROWS = 6
"""Rows of a drafter's measured pass."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds that passes of one model take."""

    step_ms: float
    """Milliseconds of a pass of one row."""
    row_ms: float
    """Milliseconds that each further row of the same session adds."""


def measure(
    target: PackedLM, drafter: PackedLM, clock: Callable[[], float] = time.perf_counter
) -> tuple[Cost, Cost]:
    """Costs of target and drafter, from the fastest of several passes: other work delayed the slower ones.

    ``clock`` tells seconds; the processor time of passes on one thread does not count other processes.
    """
    ends = time.perf_counter() + _BUDGET_S
    with _Short(target, clock) as big, _Short(drafter, clock) as small:
        sizes = [(big, 1), (big, TARGET_ROWS), (small, 1), (small, DRAFTER_ROWS)]
        fastest = [inf] * len(sizes)
        for repeat in range(_MOST):
            if repeat >= _LEAST and time.perf_counter() > ends:
                break
            for index, (session, rows) in enumerate(sizes):
                fastest[index] = min(fastest[index], session.pass_ms(rows), session.pass_ms(rows))
    one, many, drafted_one, drafted_many = fastest
    return _cost(one, many, TARGET_ROWS), _cost(drafted_one, drafted_many, DRAFTER_ROWS)


def _cost(one: float, many: float, rows: int) -> Cost:
    return Cost(round(one, 4), round(max(0.0, many - one) / (rows - 1), 4))


class _Short:
    """A session with a short context."""

    def __init__(self, lm: PackedLM, clock: Callable[[], float]) -> None:
        self._lm = lm
        self._clock = clock
        self._table = lm.table()

    def __enter__(self) -> Self:
        context = min(_CONTEXT, self._lm.max_length // 2)
        self._lm.forward([SequenceRows(self._table, (0,) * context, _chain(context), ())])
        self._table.commit(_chain(context, 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._lm.release(self._table)

    def pass_ms(self, rows: int) -> float:
        """Milliseconds of a pass over a chain of `rows` rows, with the logits of all rows."""
        rows = min(rows, self._lm.max_length - self._table.length)
        began = self._clock()
        self._lm.forward([SequenceRows(self._table, (0,) * rows, _chain(rows), range(rows))])
        took = (self._clock() - began) * 1000
        self._table.drop_nodes()
        return took


def _chain(length: int, begin: int = -1) -> Sequence[int]:
    return range(begin, begin + length)
