"""Simulates many seeds in batches, in several processes of this machine, and adds up their outcomes."""

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from benchmarks.simulation.bugs import planted
from benchmarks.simulation.plan import Plan, plan_of, with_pool
from benchmarks.simulation.world import simulate

BATCH = 50
"""Seeds that a process simulates at a time."""


@dataclass(slots=True)
class SearchResult:
    """The outcomes of many seeds, added up."""

    seeds: int = 0
    failing: dict[int, list[str]] = field(default_factory=dict)
    """Violations by seed."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each event happened, over all seeds."""
    cpu_seconds: float = 0.0
    """Processor time of the simulations."""
    seconds: float = 0.0
    """Wall time of the whole search."""

    def add(self, other: "SearchResult") -> None:
        """Adds the outcomes of other seeds to these."""
        self.seeds += other.seeds
        self.failing |= other.failing
        self.counts.update(other.counts)
        self.cpu_seconds += other.cpu_seconds


def batch(seeds: range, bug: str = "", drafters: int = 0) -> SearchResult:
    """Simulates these seeds in this process, with the named bug planted; `drafters`: see `search`."""
    found, began = SearchResult(), time.process_time()
    with planted(bug):
        for seed in seeds:
            outcome = simulate(seed, plan=planned(seed, drafters))
            found.seeds += 1
            found.counts.update(outcome.counts)
            if outcome.violations:
                found.failing[seed] = outcome.violations
    gc.collect()
    found.cpu_seconds = time.process_time() - began
    return found


def first_failing(seeds: range, bug: str) -> int | None:
    """The first of these seeds with a violation, in this process; None where there is none."""
    with planted(bug):
        return next((seed for seed in seeds if simulate(seed).violations), None)


def planned(seed: int, drafters: int = 0) -> Plan:
    """The plan of a seed; with a pool of `drafters` drafters of one name, if not 0."""
    plan = plan_of(seed)
    return with_pool(plan, drafters) if drafters else plan


def search(
    seeds: range, processes: int, bug: str = "", *, drafters: int = 0, progress: bool = False
) -> SearchResult:
    """Simulates all seeds in several processes.

    Args:
        processes: how many processes simulate at once.
        bug: name of the bug to plant; empty: none.
        drafters: if not 0, every plan has a pool of this number of drafters.
        progress: whether each failing seed is printed at once.
    """
    found, began = SearchResult(), time.perf_counter()
    for part in _parts(seeds, processes, bug, drafters):
        for seed, what in part.failing.items():
            if progress:
                print(f"seed {seed}: {what[0]}", flush=True)
        found.add(part)
    found.seconds = time.perf_counter() - began
    return found


def trace(seeds: range, bug: str = "", drafters: int = 0) -> SearchResult:
    """Simulates these seeds one after the other and prints every event to standard output."""
    found, began = SearchResult(), time.perf_counter()
    with planted(bug):
        for seed in seeds:
            print(f"seed {seed}")
            outcome = simulate(seed, print, planned(seed, drafters))
            found.seeds += 1
            found.counts.update(outcome.counts)
            if outcome.violations:
                found.failing[seed] = outcome.violations
    found.seconds = found.cpu_seconds = time.perf_counter() - began
    return found


def _parts(seeds: range, processes: int, bug: str, drafters: int) -> Iterator[SearchResult]:
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    if processes <= 1 or len(batches) <= 1:
        yield from (batch(each, bug, drafters) for each in batches)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(batch, each, bug, drafters) for each in batches]):
            yield future.result()
