"""Chooses the kernel that multiplies a number of rows by a weight, from measured times.

Pure: reads no clock and knows no torch. `measuring` takes the times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, groupby


class WeightLayout(StrEnum):
    """Order of a weight's elements in memory."""

    ROW = "row"
    """Row-major ``[out, in]``, as models are saved."""
    COLUMN = "column"
    """Column-major."""
    BLOCKED = "blocked"
    """oneDNN's own blocks."""


class LinearKernel(StrEnum):
    """A way to multiply rows by a weight. In order of simplicity: of equals the first is taken."""

    ROW = "row"
    """torch's product with the row-major weight."""
    COLUMN = "column"
    """torch's product with the column-major weight."""
    BLOCKED = "blocked"
    """oneDNN's product with the blocked weight."""
    PADDED = "padded"
    """As BLOCKED, with one to three rows filled up to four."""

    @property
    def layout(self) -> WeightLayout:
        """The layout of the weight that the kernel reads."""
        return WeightLayout.BLOCKED if self is LinearKernel.PADDED else WeightLayout(self.value)


MEASURED_ROWS = (1, 2, 4, 8, 16, 64)
"""Numbers of rows whose products are measured, ascending."""

_SHARES = {1: 6, 2: 2, 4: 3, 8: 3, 16: 2, 64: 1}
"""How much each measured number of rows counts in the choice of layouts: plain decoding and trees of few
nodes are most passes, prompts are few."""

_EQUAL = 1.05
"""Ratio up to which two kernels' times are taken for equal: repeated measurements differ by as much."""

_EQUAL_LAYOUTS = 1.03
"""Ratio up to which the mean times of two sets of layouts are taken for equal."""

KernelTimes = Mapping[LinearKernel, Mapping[int, float]]
"""Seconds of one product by kernel and number of rows; every kernel has the same numbers of rows."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel of one weight for each number of rows."""

    kernels: tuple[LinearKernel, ...]
    """Kernel of 1 row, of 2 rows, and so on; more rows than entries take the last one."""

    @property
    def layouts(self) -> tuple[WeightLayout, ...]:
        """Layouts that the kernels read, without repeats."""
        return tuple(dict.fromkeys(kernel.layout for kernel in self.kernels))

    def kernel(self, rows: int) -> LinearKernel:
        """The kernel that multiplies this number of rows, at least 1."""
        return self.kernels[min(rows, len(self.kernels)) - 1]

    def ranges(self) -> dict[str, str]:
        """Kernel by range of rows, for people: ``{"1": "row", "2-8": "blocked", "9+": "column"}``."""
        found: dict[str, str] = {}
        first = 1
        for kernel, equal in groupby(self.kernels):
            last = first + len(list(equal)) - 1
            end = "+" if last == len(self.kernels) else "" if last == first else f"-{last}"
            found[f"{first}{end}"] = kernel.value
            first = last + 1
        return found


UNMEASURED = KernelChoice((LinearKernel.PADDED,))
"""The choice for a weight that was not measured in time: oneDNN's layout is seldom far from the best."""


def choose_kernels(times: KernelTimes, most_layouts: int) -> KernelChoice:
    """The fastest kernels that need at most ``most_layouts`` layouts of the weight.

    A further layout is taken only where it saves more than 3 % on average, and a kernel that comes later in
    `LinearKernel` only where it saves more than 5 %. Times are interpolated between measured numbers of rows.
    """
    counts = sorted(next(iter(times.values()), {}))
    if not counts:
        return UNMEASURED
    usable = _of_layouts(times, _choose_layouts(times, counts, most_layouts))
    return KernelChoice(
        tuple(
            _simplest({kernel: _interpolated(by_rows, counts, rows) for kernel, by_rows in usable.items()})
            for rows in range(1, counts[-1] + 1)
        )
    )


def _choose_layouts(times: KernelTimes, counts: Sequence[int], most: int) -> tuple[WeightLayout, ...]:
    """The layouts to keep: the smallest set within 3 % of the best one."""
    sets = [kept for size in range(1, most + 1) for kept in combinations(WeightLayout, size)]
    costs = {kept: _cost(times, counts, kept) for kept in sets}
    best = min(costs.values())
    return next(kept for kept in sets if costs[kept] <= best * _EQUAL_LAYOUTS)


def _cost(times: KernelTimes, counts: Sequence[int], kept: Sequence[WeightLayout]) -> float:
    """Time with these layouts over the time with all of them, averaged over the measured numbers of rows."""
    usable = _of_layouts(times, kept)
    ratios = {
        rows: min(by_rows[rows] for by_rows in usable.values())
        / min(by_rows[rows] for by_rows in times.values())
        for rows in counts
    }
    shares = {rows: _SHARES.get(rows, 1) for rows in counts}
    return sum(shares[rows] * ratios[rows] for rows in counts) / sum(shares.values())


def _of_layouts(times: KernelTimes, kept: Sequence[WeightLayout]) -> KernelTimes:
    return {kernel: times[kernel] for kernel in LinearKernel if kernel in times and kernel.layout in kept}


def _simplest(times: Mapping[LinearKernel, float]) -> LinearKernel:
    """The first kernel within 5 % of the fastest."""
    best = min(times.values())
    return next(kernel for kernel, spent in times.items() if spent <= best * _EQUAL)


def _interpolated(by_rows: Mapping[int, float], counts: Sequence[int], rows: int) -> float:
    """Time for ``rows`` rows, on the line between the measured numbers of rows on both sides."""
    if rows in by_rows:
        return by_rows[rows]
    low = max((count for count in counts if count < rows), default=counts[0])
    high = min(count for count in counts if count > rows)
    part = (rows - low) / (high - low)
    return by_rows[low] * (1 - part) + by_rows[high] * part
