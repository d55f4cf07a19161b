"""What passes of two models cost on this machine, measured side by side."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from outrider.lm.packed import PackedLM
from outrider.lm.plan import Share

_CONTEXT = 128
_REPEATS = 9
_BUDGET_S = 20.0
"""Models so slow that this runs out are measured less often."""
_LEAST = 3
TARGET_ROWS = 17
"""The last committed id and sixteen nodes."""
DRAFTER_ROWS = 6


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one model."""

    step_ms: float
    """A pass of one row."""
    row_ms: float
    """What each further row of the same session adds."""


def measure(target: PackedLM, drafter: PackedLM) -> tuple[Cost, Cost]:
    """Medians of passes in turn, so that what else runs on the machine slows both alike."""
    ends = time.perf_counter() + _BUDGET_S
    sizes = [(target, 1), (target, TARGET_ROWS), (drafter, 1), (drafter, DRAFTER_ROWS)]
    taken: list[list[float]] = [[] for _ in sizes]
    for repeat in range(-1, _REPEATS):
        if repeat >= _LEAST and time.perf_counter() > ends:
            break
        for (lm, rows), times in zip(sizes, taken, strict=True):
            took = _pass_ms(lm, rows)
            if repeat >= 0:  # the first is for caches and code that is loaded late
                times.append(took)
    one, many, drafted_one, drafted_many = map(median, taken)
    return _cost(one, many, TARGET_ROWS), _cost(drafted_one, drafted_many, DRAFTER_ROWS)


def _cost(one: float, many: float, rows: int) -> Cost:
    return Cost(one, max(0.0, many - one) / (rows - 1))


def _pass_ms(lm: PackedLM, rows: int) -> float:
    """A chain of so many rows after a short context."""
    context = min(_CONTEXT, lm.max_length // 2)
    rows = min(rows, lm.max_length - context)
    table = lm.table()
    try:
        lm.forward([Share(table, (0,) * context, _chain(context), ())])
        table.commit(_chain(context, 0))
        began = time.perf_counter()
        lm.forward([Share(table, (0,) * rows, _chain(rows), tuple(range(rows)))]).numpy()
        return (time.perf_counter() - began) * 1000
    finally:
        lm.release(table)


def _chain(length: int, begin: int = -1) -> Sequence[int]:
    return range(begin, begin + length)
