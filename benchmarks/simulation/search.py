"""Many seeds, in several processes of this machine, in batches; what they found, together."""

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from benchmarks.simulation.bugs import planted
from benchmarks.simulation.world import simulate

BATCH = 50


@dataclass(slots=True)
class Found:
    """What many seeds gave."""

    seeds: int = 0
    failing: dict[int, list[str]] = field(default_factory=dict)
    """Violations by seed."""
    counts: Counter[str] = field(default_factory=Counter)
    """What happened, over all seeds."""
    cpu_seconds: float = 0.0
    """Of processor time for the simulations."""
    seconds: float = 0.0
    """Of the machine's time for all of it."""

    def add(self, other: "Found") -> None:
        """The other's come on top."""
        self.seeds += other.seeds
        self.failing |= other.failing
        self.counts.update(other.counts)
        self.cpu_seconds += other.cpu_seconds


def batch(seeds: range, bug: str = "") -> Found:
    """These seeds, in this process."""
    found, began = Found(), time.process_time()
    with planted(bug):
        for seed in seeds:
            outcome = simulate(seed)
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


def search(seeds: range, processes: int, bug: str = "", *, tell: bool = False) -> Found:
    """All seeds, in so many processes; `tell` prints each that fails, as it does."""
    found, began = Found(), time.perf_counter()
    for part in _parts(seeds, processes, bug):
        for seed, what in part.failing.items():
            if tell:
                print(f"seed {seed}: {what[0]}", flush=True)
        found.add(part)
    found.seconds = time.perf_counter() - began
    return found


def trace(seeds: range, bug: str = "") -> Found:
    """These seeds, one after the other, with everything that happens on standard output."""
    found, began = Found(), time.perf_counter()
    with planted(bug):
        for seed in seeds:
            print(f"seed {seed}")
            outcome = simulate(seed, print)
            found.seeds += 1
            found.counts.update(outcome.counts)
            if outcome.violations:
                found.failing[seed] = outcome.violations
    found.seconds = found.cpu_seconds = time.perf_counter() - began
    return found


def _parts(seeds: range, processes: int, bug: str) -> Iterator[Found]:
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    if processes <= 1 or len(batches) <= 1:
        yield from (batch(each, bug) for each in batches)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(batch, each, bug) for each in batches]):
            yield future.result()
