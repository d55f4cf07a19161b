"""How long this target takes for steps of several sizes, measured once at load.

The budget weighs drafted nodes against what their rows cost. Measuring that from the first request on would
mean serving the first ones badly.
"""

import logging
import time
from collections.abc import Sequence

from outrider.lm.packed import PackedLM
from outrider.lm.plan import Share
from outrider.lm.table import SlotTable
from verifier_service.pace import PROFILED, StepPace

log = logging.getLogger(__name__)

_CONTEXT = 64
_SESSIONS = 4
_REPEATS = 3
_BUDGET_S = 2.0
"""A target so slow that this runs out is measured at fewer sizes."""


def profiled(target: PackedLM) -> StepPace:
    """Runs a few passes of each size and takes the fastest: the others were held up by something else."""
    longest = min(target.max_length, target.pool.max_slots // _SESSIONS)
    context = min(_CONTEXT, longest // 2)
    tables = [target.table() for _ in range(_SESSIONS)]
    try:
        for table in tables:
            target.forward([Share(table, (0,) * context, tuple(range(-1, context - 1)), ())])
            table.commit(tuple(range(context)))
        return _measured(target, tables, [rows for rows in PROFILED if rows <= longest - context])
    finally:
        for table in tables:
            target.release(table)


def _measured(target: PackedLM, tables: Sequence[SlotTable], sizes: Sequence[int]) -> StepPace:
    alone: dict[int, float] = {}
    together = float("inf")
    ends = time.perf_counter() + _BUDGET_S
    for _ in range(_REPEATS):
        for rows in sizes:
            if time.perf_counter() < ends or rows <= sizes[0]:
                alone[rows] = min(_pass_ms(target, tables[:1], rows), alone.get(rows, float("inf")))
        together = min(_pass_ms(target, tables, 1), together)
    log.info("steps take", extra={"fields": {"ms_by_rows": {n: round(ms, 2) for n, ms in alone.items()}}})
    session_ms = (together - StepPace(alone).expected_ms(_SESSIONS)) / (_SESSIONS - 1)
    return StepPace(alone, max(0.0, session_ms))


def _pass_ms(target: PackedLM, tables: Sequence[SlotTable], rows: int) -> float:
    """One pass of so many rows of each session, siblings all, whose logits are all wanted."""
    shares = [Share(table, (0,) * rows, (-1,) * rows, tuple(range(rows))) for table in tables]
    began = time.perf_counter()
    target.forward(shares).numpy()
    took_ms = (time.perf_counter() - began) * 1000
    for table in tables:
        table.drop_nodes()
    return took_ms
