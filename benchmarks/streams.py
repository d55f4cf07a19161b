"""Batches of streams over the held-out prompts, which start together: what load is made of."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from figures import Run

from outrider.client import AsyncClient

TEMPERATURES = (0.0, 0.8)
"""Of every other stream."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What a batch of streams that ran together gave."""

    ids: tuple[tuple[int, ...], ...]
    seconds: float
    gaps_ms: tuple[float, ...]
    """Between the messages of each stream."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Where requests go and how they speculate."""

    address: str
    speculation: bool = True
    sources: tuple[str, ...] | None = None


class Load:
    """Batches of streams; stream i is the same request whatever the arm."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
        self.prompts = prompts
        self.tokens = tokens

    def together(self, arm: Arm, count: int) -> Streams:
        """So many streams at once."""
        return asyncio.run(self._together(arm, count))

    async def _together(self, arm: Arm, count: int) -> Streams:
        async with AsyncClient(arm.address) as client:
            started = time.perf_counter()
            streams = await asyncio.gather(*(self.stream(client, arm, index) for index in range(count)))
            seconds = time.perf_counter() - started
        gaps = tuple(itertools.chain.from_iterable(gaps for _, gaps in streams))
        return Streams(tuple(ids for ids, _ in streams), seconds, gaps)

    async def stream(
        self, client: AsyncClient, arm: Arm, index: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ids of one stream and the ms between its messages."""
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


def flat(arm: str, key: int, repeat: int, streams: Streams) -> Run:
    """As a run of the figures: all streams' ids, one after another."""
    return Run(arm, key, repeat, tuple(itertools.chain.from_iterable(streams.ids)), streams.seconds)


def interleaved(
    load: Load, arms: dict[str, Arm], counts: Sequence[int], repeats: Sequence[int]
) -> tuple[list[Run], dict[tuple[str, int], list[float]]]:
    """Every arm at every number of streams, in an order that turns round each time (ABBA)."""
    runs: list[Run] = []
    gaps: dict[tuple[str, int], list[float]] = {}
    turns = itertools.cycle([list(arms), list(reversed(arms))])
    for count in counts:
        for repeat in repeats:
            for name in next(turns):
                done = load.together(arms[name], count)
                runs.append(flat(name, count, repeat, done))
                gaps.setdefault((name, count), []).extend(done.gaps_ms)
    return runs, gaps


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank, in ms."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
