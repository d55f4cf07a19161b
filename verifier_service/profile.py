"""How long this target takes for steps of several sizes, measured once at load.

The budget weighs drafted nodes against what their rows cost. Measuring that from the first request on would
mean serving the first ones badly.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from outrider.lm.packed import PackedLM
from outrider.lm.plan import Share
from outrider.lm.table import SlotTable
from verifier_service.pace import PROFILED, StepPace

log = logging.getLogger(__name__)

_CONTEXT = 64
_SESSIONS = 4
_REPEATS = 3
_BUDGET_S = 2.0
"""A target so slow that this runs out is measured at fewer sizes, and not with a long past."""
_DEEP = 1024
"""Cached positions of a long past, or half of what there may be."""
_CHUNK = 128
_ROWS = 64


def profiled(target: PackedLM) -> StepPace:
    """Runs a few passes of each size and takes the fastest: the others were held up by something else."""
    longest = min(target.max_length, target.pool.max_slots // _SESSIONS)
    context = min(_CONTEXT, longest // 2)
    tables = [target.table() for _ in range(_SESSIONS)]
    try:
        for table in tables:
            _extend(target, table, context)
        sizes = [rows for rows in PROFILED if rows <= longest - context]
        return _measured(target, tables, sizes, min(_DEEP, longest // 2))
    finally:
        for table in tables:
            target.release(table)


def _measured(target: PackedLM, tables: Sequence[SlotTable], sizes: Sequence[int], deep: int) -> StepPace:
    alone: dict[int, float] = {}
    together = float("inf")
    ends = time.perf_counter() + _BUDGET_S
    for _ in range(_REPEATS):
        for rows in sizes:
            if time.perf_counter() < ends or rows <= sizes[0]:
                alone[rows] = min(_pass_ms(target, tables[:1], rows), alone.get(rows, float("inf")))
        together = min(_pass_ms(target, tables, 1), together)
    session_ms = (together - StepPace(alone).expected_ms(_SESSIONS)) / (_SESSIONS - 1)
    depth = tables[0].length
    deeper_ms = _deeper_ms(target, tables[0], alone, deep) if time.perf_counter() < ends else 0.0
    by_rows = {rows: round(ms, 2) for rows, ms in alone.items()}
    fields = {"ms_by_rows": by_rows, "ns_by_row_and_position": round(deeper_ms * 1e6)}
    log.info("steps take", extra={"fields": fields})
    return StepPace(alone, max(0.0, session_ms), depth, deeper_ms)


def _deeper_ms(target: PackedLM, table: SlotTable, alone: Mapping[int, float], deep: int) -> float:
    """What one more cached position adds for each row, from passes of one session with a long past."""
    before = table.length
    ends = time.perf_counter() + _BUDGET_S
    while table.length < deep and time.perf_counter() < ends:
        _extend(target, table, min(_CHUNK, deep - table.length))
    if table.length < 2 * before or _ROWS not in alone:
        return 0.0
    took_ms = min(_pass_ms(target, [table], _ROWS) for _ in range(_REPEATS))
    return max(0.0, took_ms - alone[_ROWS]) / (_ROWS * (table.length - before))


def _extend(target: PackedLM, table: SlotTable, rows: int) -> None:
    """So many cached positions more."""
    target.forward([Share(table, (0,) * rows, tuple(range(-1, rows - 1)), ())])
    table.keep(range(rows))


def _pass_ms(target: PackedLM, tables: Sequence[SlotTable], rows: int) -> float:
    """One pass of so many rows of each session, siblings all, whose logits are all wanted."""
    shares = [Share(table, (0,) * rows, (-1,) * rows, tuple(range(rows))) for table in tables]
    began = time.perf_counter()
    target.forward(shares).numpy()
    took_ms = (time.perf_counter() - began) * 1000
    for table in tables:
        table.drop_nodes()
    return took_ms
