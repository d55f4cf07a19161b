"""How long passes take, by their rows: measured at load, and again once passes are compiled."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.lm.kv.pool import SlotPool
from outrider.lm.kv.table import SlotTable
from outrider.lm.outcome import Outcome
from outrider.lm.plan import SequenceRows

log = logging.getLogger(__name__)

PROFILED = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256)
"""Numbers of rows to be profiled. Kernels work in tiles, so both sides of likely edges are among them."""

_CONTEXT = 64
_SESSIONS = 4
_REPEATS = 3
_BUDGET_S = 2.0
"""Seconds of measuring, after which a slow target is measured at no more sizes and without a long past."""
_DEEP = 1024
"""Cached positions of a long past; at most half of those that a session may have."""
_CHUNK = 128
_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Measured times of passes, in ms."""

    ms_by_rows: Mapping[int, float]
    """A pass of one session, by its rows; empty: nothing was measured."""
    session_ms: float = 0.0
    """What each further session adds to a pass of as many rows."""
    depth: float = 0.0
    """Number of cached positions that the rows of `ms_by_rows` attended over."""
    deeper_ms: float = 0.0
    """What each further cached position adds for each row."""


class Profilable(Protocol):
    """What a profile needs of a model: a PackedLM, or its compiled passes before they serve."""

    pool: SlotPool
    max_length: int

    @property
    def passes(self) -> str:
        """How passes run; see `PackedLM.passes`."""
        ...

    def table(self) -> SlotTable:
        """A slot table for a new session."""
        ...

    def release(self, table: SlotTable) -> None:
        """Returns a session's slots."""
        ...

    def forward(self, sequences: Sequence[SequenceRows]) -> Outcome:
        """Runs one pass."""
        ...


def profile_steps(target: Profilable) -> StepProfile:
    """Measures the fastest of a few passes of each size; takes some seconds at most."""
    longest = min(target.max_length, target.pool.max_slots // _SESSIONS)
    context = min(_CONTEXT, longest // 2)
    tables = [target.table() for _ in range(_SESSIONS)]
    try:
        for table in tables:
            _extend(target, table, context)
        sizes = [rows for rows in PROFILED if rows <= longest - context]
        for rows in sizes if target.passes not in ("eager", "ragged") else ():
            # A size may be captured, and its kernels compiled, as it first occurs.
            _pass_ms(target, tables[:1], rows)
        return _measured(target, tables, sizes, min(_DEEP, longest // 2))
    finally:
        for table in tables:
            target.release(table)


def _measured(
    target: Profilable, tables: Sequence[SlotTable], sizes: Sequence[int], deep: int
) -> StepProfile:
    alone: dict[int, float] = {}
    together = float("inf")
    ends = time.perf_counter() + _BUDGET_S
    for _ in range(_REPEATS):
        for rows in sizes:
            if time.perf_counter() < ends or rows <= sizes[0]:
                alone[rows] = min(_pass_ms(target, tables[:1], rows), alone.get(rows, float("inf")))
        together = min(_pass_ms(target, tables, 1), together)
    as_many = float(np.interp(_SESSIONS, list(alone), list(alone.values())))
    session_ms = (together - as_many) / (_SESSIONS - 1)
    depth = tables[0].length
    deeper_ms = _deeper_ms(target, tables[0], alone, deep) if time.perf_counter() < ends else 0.0
    by_rows = {rows: round(ms, 2) for rows, ms in alone.items()}
    fields = {"ms_by_rows": by_rows, "ns_by_row_and_position": round(deeper_ms * 1e6)}
    log.info("steps take", extra={"fields": fields})
    return StepProfile(alone, max(0.0, session_ms), depth, deeper_ms)


def _deeper_ms(target: Profilable, table: SlotTable, alone: Mapping[int, float], deep: int) -> float:
    """Ms that one more cached position adds for each row, from passes of one session with a long past."""
    before = table.length
    ends = time.perf_counter() + _BUDGET_S
    while table.length < deep and time.perf_counter() < ends:
        _extend(target, table, min(_CHUNK, deep - table.length))
    if table.length < 2 * before or _ROWS not in alone:
        return 0.0
    took_ms = min(_pass_ms(target, [table], _ROWS) for _ in range(_REPEATS))
    return max(0.0, took_ms - alone[_ROWS]) / (_ROWS * (table.length - before))


def _extend(target: Profilable, table: SlotTable, rows: int) -> None:
    """Computes `rows` more cached positions."""
    target.forward([SequenceRows(table, (0,) * rows, tuple(range(-1, rows - 1)), ())])
    table.keep(range(rows))


def _pass_ms(target: Profilable, tables: Sequence[SlotTable], rows: int) -> float:
    """Ms of one pass of `rows` rows of each session, all their logits wanted: siblings, or else a chain."""
    parents = tuple(range(-1, rows - 1)) if target.pool.chains_only else (-1,) * rows
    sequences = [SequenceRows(table, (0,) * rows, parents, tuple(range(rows))) for table in tables]
    began = time.perf_counter()
    target.forward(sequences).rows()
    took_ms = (time.perf_counter() - began) * 1000
    for table in tables:
        table.drop_nodes()
    return took_ms
