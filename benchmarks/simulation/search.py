"""Simulates many seeds in batches, in several processes of this machine, and adds up their outcomes."""

import gc
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass, field

from benchmarks.simulation.bugs import planted
from benchmarks.simulation.logs import quiet
from benchmarks.simulation.plan import Additions, plan_of
from benchmarks.simulation.world import simulate

NOTHING = Additions()
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
    next_seed: int = 0
    """The first seed that was not simulated: a later search goes on from there."""

    def add(self, other: "SearchResult") -> None:
        """Adds the outcomes of other seeds to these."""
        self.seeds += other.seeds
        self.failing |= other.failing
        self.counts.update(other.counts)
        self.cpu_seconds += other.cpu_seconds


def batch(seeds: range, bug: str = "", additions: Additions = NOTHING) -> SearchResult:
    """Simulates these seeds in this process, with the named bug planted; `additions`: see `search`."""
    found, began = SearchResult(), time.process_time()
    gc.freeze()  # the collection below walks what these seeds leave, not all modules
    with planted(bug), quiet():
        for seed in seeds:
            outcome = simulate(seed, plan=additions.to(plan_of(seed)))
            found.seeds += 1
            found.counts.update(outcome.counts)
            if outcome.violations:
                found.failing[seed] = outcome.violations
    gc.collect()
    gc.unfreeze()
    found.cpu_seconds = time.process_time() - began
    return found


def first_failing(seeds: range, bug: str) -> int | None:
    """The first of these seeds with a violation, in this process; None where there is none."""
    with planted(bug):
        return next((seed for seed in seeds if simulate(seed).violations), None)


def search(
    seeds: range,
    processes: int,
    bug: str = "",
    *,
    additions: Additions = NOTHING,
    seconds: float = math.inf,
    progress: bool = False,
) -> SearchResult:
    """Simulates the seeds, in order, in several processes.

    Args:
        processes: how many processes simulate at once.
        bug: name of the bug to plant; empty: none.
        additions: what every plan has beside its own.
        seconds: begins no further batch of seeds after this time.
        progress: whether each failing seed is printed at once.
    """
    began = time.perf_counter()
    found = SearchResult(next_seed=seeds.start)
    for part in _parts(_batches(seeds, began + seconds), processes, bug, additions):
        for seed, what in part.failing.items():
            if progress:
                print(f"seed {seed}: {what[0]}", flush=True)
        found.add(part)
    found.next_seed += found.seeds
    found.seconds = time.perf_counter() - began
    return found


def trace(seeds: range, bug: str = "", additions: Additions = NOTHING) -> SearchResult:
    """Simulates these seeds one after the other and prints every event to standard output."""
    found, began = SearchResult(next_seed=seeds.stop), time.perf_counter()
    with planted(bug):
        for seed in seeds:
            print(f"seed {seed}")
            outcome = simulate(seed, print, additions.to(plan_of(seed)))
            found.seeds += 1
            found.counts.update(outcome.counts)
            if outcome.violations:
                found.failing[seed] = outcome.violations
    found.seconds = found.cpu_seconds = time.perf_counter() - began
    return found


def _batches(seeds: range, ends: float) -> Iterator[range]:
    """The seeds in batches, until none is left or the time `ends` has passed."""
    for start in range(0, len(seeds), BATCH):
        if time.perf_counter() >= ends:
            return
        yield seeds[start : start + BATCH]


def _parts(
    batches: Iterator[range], processes: int, bug: str, additions: Additions
) -> Iterator[SearchResult]:
    if processes <= 1:
        yield from (batch(each, bug, additions) for each in batches)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        running: set[Future[SearchResult]] = set()
        for each in batches:
            running.add(pool.submit(batch, each, bug, additions))
            if len(running) > processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(running))
