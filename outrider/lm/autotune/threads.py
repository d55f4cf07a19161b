"""Number of threads that compute a model's passes on the CPU, chosen from measured times.

`choose_threads` and `PassThreads.chosen` are pure. `measure_threads` runs eager passes before linear layers
are packed: kernels are measured with the threads that were chosen. `measure_helpers` runs compiled passes
before they serve.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, Self

import torch

from outrider.lm.plan import SequenceRows
from outrider.lm.step_profile import Profilable

log = logging.getLogger(__name__)

MEASURED_ROWS = (1, 8, 64)
"""Rows of the eager passes that are timed: plain decoding, a tree, a batch or a prompt's chunk."""

HELPED_ROWS = (1, 2, 4, 8, 16, 64)
"""Rows of the compiled passes that are timed."""

_EQUAL = 1.1
"""Ratio up to which two times are taken for equal. Fewer threads then win: they leave cores to others."""

_GAIN = 1.05
"""Ratio from which a pass is taken to gain from threads that help."""

_LARGE_S = 0.25
"""Duration of a pass of one row, in seconds, from which a model is large: it gains from every thread."""

_LARGE_HELPED_S = 0.01
"""The same for a compiled pass with one thread. The bound is lower: its helpers take nothing from others."""

_LIMIT_S = 1.5
"""Longest time in which threads are measured, in seconds; the pass at hand is finished."""

_ROUNDS = 5
"""Times that each pass is timed; the smallest counts."""


@dataclass(frozen=True, slots=True)
class ThreadBounds:
    """The most threads that a measurement may choose."""

    eager: int
    """For eager passes: torch's threads, which wait for one another."""
    compiled: int
    """For compiled passes, whose threads beyond the first compute on idle cores alone."""


ThreadTimes = Mapping[int, Mapping[int, float]]
"""Seconds of one pass by number of threads and number of rows."""


@dataclass(frozen=True, slots=True)
class PassThreads:
    """Threads that compute a compiled pass, its own thread included."""

    most: int = 0
    """Number of threads; 0: as many as torch has."""
    from_rows: int = 1
    """Passes of fewer rows are computed by one thread."""

    @classmethod
    def chosen(cls, times: ThreadTimes, most: int) -> Self:
        """``most`` threads, for passes of at least as many rows as these threads speed up.

        They speed up a number of rows if they save 5 % there, and 5 % on average from there on. Where they
        speed up no pass that was timed, they compute larger passes alone.
        """
        gains = {rows: alone / times[most][rows] for rows, alone in times[1].items() if rows in times[most]}
        for rows in sorted(gains):
            onwards = [gain for other, gain in gains.items() if other >= rows]
            if min(gains[rows], prod(onwards) ** (1 / len(onwards))) >= _GAIN:
                return cls(most, rows)
        return cls(most, max(gains, default=0) + 1)

    def of(self, rows: int) -> int:
        """Threads of a pass of so many rows; 0: as many as torch has."""
        return self.most if rows >= self.from_rows else 1


class HelpedPasses(Profilable, Protocol):
    """Compiled passes before they serve."""

    def use_threads(self, threads: PassThreads) -> None:
        """Has these threads compute the passes from now on."""
        ...


def candidates(most: int) -> list[int]:
    """Numbers of threads to compare, descending: ``most`` and the powers of two below it."""
    powers = [2**power for power in range(most.bit_length())]
    return sorted({most, *powers}, reverse=True)


def choose_threads(times: ThreadTimes, equal: float = _EQUAL) -> int:
    """The fewest threads whose passes take at most ``equal`` times as long as those of the best number.

    Numbers of threads compare by the geometric mean over the rows that all of them were timed with.
    """
    shared = set.intersection(*(set(by_rows) for by_rows in times.values()))
    means = {
        count: prod(by_rows[rows] for rows in shared) ** (1 / len(shared)) for count, by_rows in times.items()
    }
    best = min(means.values())
    return min(count for count, mean in means.items() if mean <= best * equal)


def measure_threads(lm: Profilable, most: int) -> int:
    """Sets torch to the number of threads, at most ``most``, that computes the model's eager passes best.

    Returns that number. With several threads, a model whose pass of one row takes 0.25 s keeps ``most``.
    """
    torch.set_num_threads(most)
    if most == 1:
        return 1
    times = _times(lm, MEASURED_ROWS, candidates(most), torch.set_num_threads)
    chosen = choose_threads(times) if times else most
    torch.set_num_threads(chosen)
    _log(lm, times, chosen, from_rows=1)
    return chosen


def measure_helpers(lm: HelpedPasses, most: int | None) -> PassThreads:
    """Chooses the threads of compiled passes, at most ``most``, sets them in ``lm`` and returns them.

    Without ``most`` the number is torch's, and only the rows from which threads help are measured. A model
    whose pass of one row takes 10 ms with one thread gets all threads.
    """

    def use_threads(count: int) -> None:
        lm.use_threads(PassThreads(count))

    # Few threads first: helpers that were started stay.
    compared = sorted(candidates(most) if most else {torch.get_num_threads(), 1})
    threads = PassThreads(compared[-1])
    if len(compared) > 1:
        times = _times(lm, HELPED_ROWS, compared, use_threads, _LARGE_HELPED_S)
        if times:
            threads = PassThreads.chosen(times, _helped(times) if most else compared[-1])
        _log(lm, times, threads.most, threads.from_rows)
    lm.use_threads(threads)
    return threads


def _helped(times: ThreadTimes) -> int:
    """The fewest threads that are about as fast as the best number, with one thread for small passes."""
    used = {}
    for count in times:
        threads = PassThreads.chosen(times, count)
        used[count] = {rows: times[threads.of(rows)][rows] for rows in times[count]}
    return choose_threads(used, _GAIN)


def _log(lm: Profilable, times: ThreadTimes, chosen: int, from_rows: int) -> None:
    ms = {
        threads: {rows: round(1e3 * spent, 2) for rows, spent in by.items()} for threads, by in times.items()
    }
    fields = {"passes": lm.passes, "chosen": chosen, "from_rows": from_rows, "ms by threads x rows": ms}
    log.info("threads were measured", extra={"fields": fields})


def _times(
    lm: Profilable,
    measured: Sequence[int],
    compared: Sequence[int],
    use_threads: Callable[[int], None],
    large_s: float = _LARGE_S,
) -> dict[int, dict[int, float]]:
    """Smallest durations of passes by threads and rows; empty for a large model."""
    end = time.perf_counter() + _LIMIT_S
    times: dict[int, dict[int, float]] = {}
    use_threads(compared[0])
    for rows in measured:
        if rows > lm.max_length or time.perf_counter() > end:
            break
        run = _pass(lm, rows)
        run()  # memory is allocated and threads are started
        if rows == 1 and run() > large_s:
            break
        for _ in range(_ROUNDS):
            for threads in compared:
                use_threads(threads)
                by_rows = times.setdefault(threads, {})
                by_rows[rows] = min(run(), by_rows.get(rows, float("inf")))
            if time.perf_counter() > end:
                break
    return times


def _pass(lm: Profilable, rows: int) -> Callable[[], float]:
    """A function that runs one pass of a chain of ``rows`` rows and returns its duration in seconds."""

    def run() -> float:
        table = lm.table()
        try:
            started = time.perf_counter()
            lm.forward([SequenceRows(table, [0] * rows, range(-1, rows - 1), range(rows))])
            return time.perf_counter() - started
        finally:
            lm.release(table)

    return run
