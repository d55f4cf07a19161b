"""Figures out of runs: rates, paired ratios and their interval. Pure; knows no model and no clock."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Run:
    """One request that was timed."""

    arm: str
    prompt: int
    repeat: int
    ids: tuple[int, ...]
    # From the request to its last token, prefill included.
    seconds: float
    rounds: int = 0
    accepted: tuple[tuple[str, int], ...] = ()

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.seconds


def tokens_per_second(runs: Iterable[Run]) -> float:
    """Tokens over seconds, each summed over prompts; the median of the repeats."""
    by_repeat: dict[int, list[Run]] = {}
    for run in runs:
        by_repeat.setdefault(run.repeat, []).append(run)
    rates = [sum(len(r.ids) for r in rs) / sum(r.seconds for r in rs) for rs in by_repeat.values()]
    return round(median(rates), 1)


def acceptance_length(runs: Sequence[Run]) -> float:
    """Completion tokens over rounds; 1.0 is plain decoding."""
    return round(sum(len(r.ids) for r in runs) / sum(r.rounds for r in runs), 3)


def accepted_share(runs: Sequence[Run]) -> dict[str, float]:
    """Share of the completion tokens that each source drafted."""
    total = sum(len(run.ids) for run in runs)
    counts: dict[str, int] = {}
    for run in runs:
        for name, count in run.accepted:
            counts[name] = counts.get(name, 0) + count
    return {name: round(count / total, 3) for name, count in sorted(counts.items())}


def paired_ratio(runs: Sequence[Run], arm: str, other: str) -> dict[str, float | int]:
    """The median of rate(arm) / rate(other) over the same prompt and repeat, with its 95 % interval."""
    rates = {(run.arm, run.prompt, run.repeat): run.rate for run in runs}
    ratios = sorted(
        rate / rates[other, prompt, repeat]
        for (name, prompt, repeat), rate in rates.items()
        if name == arm and (other, prompt, repeat) in rates
    )
    low, high = median_interval(len(ratios))
    return {
        "median": round(median(ratios), 3),
        "low": round(ratios[low], 3),
        "high": round(ratios[high], 3),
        "pairs": len(ratios),
    }


def same_ids(runs: Sequence[Run], arms: Sequence[str]) -> bool:
    """Whether, for each prompt, every repeat of every one of these arms gave the same ids."""
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        if run.arm in arms:
            by_prompt.setdefault(run.prompt, set()).add(run.ids)
    return bool(by_prompt) and all(len(ids) == 1 for ids in by_prompt.values())


def median_interval(count: int) -> tuple[int, int]:
    """Order statistics around the median, at least 95 % (binomial); the extremes below six pairs."""
    low = 0
    while _binomial_below(count, low + 1) <= 0.025:
        low += 1
    return low, count - 1 - low


def _binomial_below(count: int, k: int) -> float:
    return sum(math.comb(count, i) for i in range(k + 1)) / 2.0**count
