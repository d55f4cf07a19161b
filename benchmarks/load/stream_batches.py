"""Batches of streams over the held-out prompts that start together."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.shared.figures import TimedRun, alternating_orders
from outrider.client import AsyncClient

TEMPERATURES = (0.0, 0.8)
"""Temperatures that the streams of a batch take in turn."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Ids, wall time and message gaps of a batch of streams that ran together."""

    ids: tuple[tuple[int, ...], ...]
    seconds: float
    gaps_ms: tuple[float, ...]
    """Milliseconds between two messages of a stream, of all streams."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The orchestrator that an arm's requests go to, and how they speculate."""

    address: str
    speculation: bool = True
    sources: tuple[str, ...] | None = None


class StreamBatches:
    """Runs batches of streams; stream i is the same request in every arm."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
        self.prompts = prompts
        self.tokens = tokens

    def run(self, arm: Arm, count: int) -> BatchResult:
        """Runs `count` streams of an arm at once."""
        return asyncio.run(self._run(arm, count))

    async def _run(self, arm: Arm, count: int) -> BatchResult:
        async with AsyncClient(arm.address) as client:
            started = time.perf_counter()
            streams = await asyncio.gather(*(self.stream(client, arm, index) for index in range(count)))
            seconds = time.perf_counter() - started
        gaps = tuple(itertools.chain.from_iterable(gaps for _, gaps in streams))
        return BatchResult(tuple(ids for ids, _ in streams), seconds, gaps)

    async def stream(
        self, client: AsyncClient, arm: Arm, index: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ids of one stream and the milliseconds between its messages."""
        ids: list[int] = []
        times = []
        stream = client.stream(
            ids=list(self.prompts[index % len(self.prompts)]),
            max_tokens=self.tokens,
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            seed=index,
            ignore_eos=True,
            speculation=arm.speculation,
            sources=None if arm.sources is None else list(arm.sources),
        )
        async for chunk in stream:
            ids += chunk.ids
            times.append(time.perf_counter() * 1000)
        return tuple(ids), tuple(after - before for before, after in itertools.pairwise(times))


def as_timed_run(arm: str, count: int, repeat: int, batch: BatchResult) -> TimedRun:
    """A batch of `count` streams as one timed run: all ids one after another, `count` as the prompt."""
    return TimedRun(arm, count, repeat, tuple(itertools.chain.from_iterable(batch.ids)), batch.seconds)


def interleaved(
    batches: StreamBatches, arms: dict[str, Arm], counts: Sequence[int], repeats: Sequence[int]
) -> tuple[list[TimedRun], dict[tuple[str, int], list[float]]]:
    """Timed runs and message gaps of every arm at every number of streams; the arms alternate (ABBA)."""
    runs: list[TimedRun] = []
    gaps: dict[tuple[str, int], list[float]] = {}
    orders = alternating_orders(arms)
    for count in counts:
        for repeat in repeats:
            for name in next(orders):
                done = batches.run(arms[name], count)
                runs.append(as_timed_run(name, count, repeat, done))
                gaps.setdefault((name, count), []).extend(done.gaps_ms)
    return runs, gaps
