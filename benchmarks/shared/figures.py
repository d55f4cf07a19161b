"""Figures from timed runs: rates, paired ratios and their intervals. Pure; knows no model and no clock."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One timed request of one arm, or one batch of them."""

    arm: str
    prompt: int
    repeat: int
    ids: tuple[int, ...]
    seconds: float
    """From the request to its last token, prefill included."""
    rounds: int = 0
    accepted: tuple[tuple[str, int], ...] = ()
    """Accepted tokens of each draft source, by the source's name."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.seconds


def tokens_per_second(runs: Iterable[TimedRun]) -> float:
    """Tokens over seconds, each summed over the prompts of a repeat; the median of the repeats."""
    by_repeat: dict[int, list[TimedRun]] = {}
    for run in runs:
        by_repeat.setdefault(run.repeat, []).append(run)
    rates = [sum(len(r.ids) for r in rs) / sum(r.seconds for r in rs) for rs in by_repeat.values()]
    return round(median(rates), 1)


def acceptance_length(runs: Sequence[TimedRun]) -> float:
    """Completion tokens over rounds; 1.0 is plain decoding."""
    return round(sum(len(r.ids) for r in runs) / sum(r.rounds for r in runs), 3)


def accepted_share(runs: Sequence[TimedRun]) -> dict[str, float]:
    """Share of the completion tokens that each source drafted, by the source's name."""
    total = sum(len(run.ids) for run in runs)
    counts: dict[str, int] = {}
    for run in runs:
        for name, count in run.accepted:
            counts[name] = counts.get(name, 0) + count
    return {name: round(count / total, 3) for name, count in sorted(counts.items())}


def paired_ratio(runs: Sequence[TimedRun], arm: str, other: str) -> dict[str, float | int]:
    """The median of rate(arm) / rate(other) over the same prompt and repeat, with its 95 % interval."""
    rates = {(run.arm, run.prompt, run.repeat): run.rate for run in runs}
    return median_of_pairs(
        rate / rates[other, prompt, repeat]
        for (name, prompt, repeat), rate in rates.items()
        if name == arm and (other, prompt, repeat) in rates
    )


def median_of_pairs(values: Iterable[float]) -> dict[str, float | int]:
    """The median of one value per pair, with its 95 % interval and the number of pairs."""
    ordered = sorted(values)
    low, high = median_interval(len(ordered))
    return {
        "median": round(median(ordered), 3),
        "low": round(ordered[low], 3),
        "high": round(ordered[high], 3),
        "pairs": len(ordered),
    }


def alternating_orders(names: Iterable[str]) -> Iterator[list[str]]:
    """The names forwards and backwards in turn, without end, so that no arm always runs first (ABBA)."""
    forwards = list(names)
    return itertools.cycle([forwards, forwards[::-1]])


def same_ids(runs: Sequence[TimedRun], arms: Sequence[str]) -> bool:
    """Whether every repeat of each of these arms gave the same ids for a prompt; False without any run."""
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        if run.arm in arms:
            by_prompt.setdefault(run.prompt, set()).add(run.ids)
    return bool(by_prompt) and all(len(ids) == 1 for ids in by_prompt.values())


def median_interval(count: int) -> tuple[int, int]:
    """Indices of the sorted values that enclose the median with at least 95 % (binomial).

    Below six values these are the smallest and the largest.
    """
    low = 0
    while _binomial_below(count, low + 1) <= 0.025:
        low += 1
    return low, count - 1 - low


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, in the values' unit, rounded to two places."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def _binomial_below(count: int, k: int) -> float:
    return sum(math.comb(count, i) for i in range(k + 1)) / 2.0**count
