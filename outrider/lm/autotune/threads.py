"""Number of threads that compute a model's passes on the CPU, chosen from measured times.

`choose_threads` is pure. `measure_threads` runs passes of the model, before its linear layers are packed:
kernels are measured afterwards, with the threads that were chosen.
"""

import logging
import time
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch

from outrider.lm.plan import SequenceRows

if TYPE_CHECKING:
    from outrider.lm.runner import PackedLM

log = logging.getLogger(__name__)

MEASURED_ROWS = (1, 8, 64)
"""Rows of the passes that are timed: plain decoding, a tree, a batch or a prompt's chunk."""

_EQUAL = 1.1
"""Ratio up to which two times are taken for equal. Fewer threads then win: they leave cores to others."""

_LARGE_S = 0.25
"""Duration of a pass of one row, in seconds, from which a model is large: it gains from every thread."""

_LIMIT_S = 1.5
"""Longest time in which threads are measured, in seconds; the pass at hand is finished."""

_ROUNDS = 3
"""Times that each pass is timed; the smallest counts."""

ThreadTimes = Mapping[int, Mapping[int, float]]
"""Seconds of one pass by number of threads and number of rows."""


def candidates(most: int) -> list[int]:
    """Numbers of threads to compare, descending: ``most`` and the powers of two below it."""
    powers = [2**power for power in range(most.bit_length())]
    return sorted({most, *powers}, reverse=True)


def choose_threads(times: ThreadTimes) -> int:
    """The fewest threads whose passes take at most 10 % longer than those of the best number of threads.

    Numbers of threads compare by the geometric mean over the rows that all of them were timed with.
    """
    shared = set.intersection(*(set(by_rows) for by_rows in times.values()))
    means = {
        count: prod(by_rows[rows] for rows in shared) ** (1 / len(shared)) for count, by_rows in times.items()
    }
    best = min(means.values())
    return min(count for count, mean in means.items() if mean <= best * _EQUAL)


def measure_threads(lm: "PackedLM", most: int) -> int:
    """Sets torch to the number of threads, at most ``most``, that computes the model's passes best.

    Returns that number. With several threads, a model whose pass of one row takes 0.25 s keeps ``most``.
    """
    torch.set_num_threads(most)
    if most == 1:
        return 1
    calls, rows_before = lm.forward_calls, lm.rows
    try:
        times = _times(lm, most)
    finally:
        lm.forward_calls, lm.rows = calls, rows_before
    chosen = choose_threads(times) if times else most
    torch.set_num_threads(chosen)
    ms = {
        threads: {rows: round(1e3 * spent, 2) for rows, spent in by.items()} for threads, by in times.items()
    }
    log.info("threads were measured", extra={"fields": {"chosen": chosen, "ms by threads x rows": ms}})
    return chosen


def _times(lm: "PackedLM", most: int) -> dict[int, dict[int, float]]:
    """Smallest durations of passes by threads and rows; empty for a large model."""
    end = time.perf_counter() + _LIMIT_S
    times: dict[int, dict[int, float]] = {}
    for rows in MEASURED_ROWS:
        if rows > lm.max_length or time.perf_counter() > end:
            break
        run = _pass(lm, rows)
        run()  # memory is allocated and threads are started
        if rows == 1 and run() > _LARGE_S:
            break
        for _ in range(_ROUNDS):
            for threads in candidates(most):
                torch.set_num_threads(threads)
                by_rows = times.setdefault(threads, {})
                by_rows[rows] = min(run(), by_rows.get(rows, float("inf")))
            if time.perf_counter() > end:
                break
    return times


def _pass(lm: "PackedLM", rows: int) -> Callable[[], float]:
    """A function that runs one pass of a chain of ``rows`` rows and returns its duration in seconds."""

    def run() -> float:
        table = lm.table(reserve=rows)
        try:
            started = time.perf_counter()
            lm.forward([SequenceRows(table, [0] * rows, range(-1, rows - 1), range(rows))])
            return time.perf_counter() - started
        finally:
            lm.release(table)

    return run
