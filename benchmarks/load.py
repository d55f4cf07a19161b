"""Many requests at a time: plain decoding, all drafted nodes, and the budget; faulty drafters; long prompts.

Run as `outrider bench load --json`. docs/figures.md says what each field means.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from envelope import REPOSITORY, print_result
from figures import Run, paired_ratio, same_ids, tokens_per_second
from offline import load_prompts
from stack import FaultyDrafter, Orchestrator, Stack, stopped

from outrider.client import AsyncClient, Client

ARMS = ("plain", "fixed", "budget")
TEMPERATURES = (0.0, 0.8)
"""Of every other stream."""
FAULTY_SESSIONS = (1, 8)
GAP_STREAMS = 8


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
    """Batches of streams over the held-out prompts."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
        self._prompts = prompts
        self._tokens = tokens

    def together(self, arm: Arm, count: int) -> Streams:
        """So many streams at once; stream i is the same request whatever the arm."""
        return asyncio.run(self._together(arm, count))

    async def _together(self, arm: Arm, count: int) -> Streams:
        async with AsyncClient(arm.address) as client:
            started = time.perf_counter()
            streams = await asyncio.gather(*(self._stream(client, arm, index) for index in range(count)))
            seconds = time.perf_counter() - started
        gaps = tuple(itertools.chain.from_iterable(gaps for _, gaps in streams))
        return Streams(tuple(ids for ids, _ in streams), seconds, gaps)

    async def _stream(
        self, client: AsyncClient, arm: Arm, index: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ids: list[int] = []
        times = []
        prompt = self._prompts[index % len(self._prompts)]
        stream = client.stream(
            ids=list(prompt),
            max_tokens=self._tokens,
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

    async def beside_a_long_prompt(self, address: str, length: int) -> float:
        """The longest gap in ms of eight streams while a prompt of so many ids is computed."""
        async with AsyncClient(address) as client:
            arm = Arm(address, speculation=False)
            streams = [asyncio.create_task(self._stream(client, arm, i)) for i in range(GAP_STREAMS)]
            await asyncio.sleep(0.3)
            long = list(itertools.islice(itertools.cycle(self._prompts[0]), length))
            await client.generate(ids=long, max_tokens=1, temperature=0.0, speculation=False)
            return max(max(gaps) for _, gaps in await asyncio.gather(*streams))


def flat(arm: str, key: int, repeat: int, streams: Streams) -> Run:
    """As a run of the figures: all streams' ids, one after another."""
    return Run(arm, key, repeat, tuple(itertools.chain.from_iterable(streams.ids)), streams.seconds)


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank, in ms."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def interleaved(
    load: Load, arms: dict[str, Arm], counts: Sequence[int], repeats: int
) -> tuple[list[Run], dict[tuple[str, int], list[float]]]:
    """Every arm at every number of streams, in an order that turns round each time (ABBA)."""
    runs, gaps = [], {}
    turns = itertools.cycle([list(arms), list(reversed(arms))])
    for count in counts:
        for repeat in range(repeats):
            for name in next(turns):
                done = load.together(arms[name], count)
                runs.append(flat(name, count, repeat, done))
                gaps.setdefault((name, count), []).extend(done.gaps_ms)
        print(f"{count} streams: done", file=sys.stderr)
    return runs, gaps


def concurrency_figures(
    load: Load, arms: dict[str, Arm], counts: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Rates, gaps between messages and the budget against the better of the other two."""
    runs, gaps = interleaved(load, arms, counts, repeats)
    rates = {
        arm: [tokens_per_second(r for r in runs if r.arm == arm and r.prompt == n) for n in counts]
        for arm in ARMS
    }
    over = []
    for at, count in enumerate(counts):
        better = max(("plain", "fixed"), key=lambda arm: rates[arm][at])
        over.append(paired_ratio([r for r in runs if r.prompt == count], "budget", better))
    return {
        "identical": same_ids(runs, ARMS),
        "concurrency": list(counts),
        "tokens_per_second": rates,
        "budget_over_better": [ratio["median"] for ratio in over],
        "budget_over_better_interval": [[ratio["low"], ratio["high"]] for ratio in over],
        "gap_ms": {
            arm: [{"p50": quantile(gaps[arm, n], 0.5), "p99": quantile(gaps[arm, n], 0.99)} for n in counts]
            for arm in ARMS
        },
    }


def faulty_figures(load: Load, stack: Stack, repeats: int) -> dict[str, Any]:
    """Speculation from a faulty drafter alone over plain decoding, at one and eight sessions: the worse."""
    verifier, drafter = stack.address_of("verifier"), stack.address_of("drafter")
    worse: dict[str, float] = {}
    with ExitStack() as held:
        for kind in ("delayed", "garbage", "stopped"):
            source = (
                drafter if kind == "stopped" else held.enter_context(FaultyDrafter(drafter, kind)).address
            )
            front = held.enter_context(Orchestrator(verifier, source)).address
            until_drafting(front)
            arms = {"plain": Arm(front, speculation=False), kind: Arm(front, sources=("drafter",))}
            with stopped(stack.pids("drafter") if kind == "stopped" else []):
                runs, _ = interleaved(load, arms, FAULTY_SESSIONS, repeats)
            assert same_ids(runs, list(arms)), f"ids differ beside a {kind} drafter"
            worse[kind] = min(
                float(paired_ratio([r for r in runs if r.prompt == n], kind, "plain")["median"])
                for n in FAULTY_SESSIONS
            )
    return worse


def gap_figures(load: Load, addresses: dict[str, str], length: int) -> dict[str, float]:
    """The median of five longest gaps, by how the long prompt is computed."""
    return {
        kind: round(median(asyncio.run(load.beside_a_long_prompt(address, length)) for _ in range(5)), 1)
        for kind, address in addresses.items()
    }


def until_drafting(address: str) -> None:
    """Until an orchestrator that has just started knows its verifier and its drafter."""
    with Client(address) as client:
        while not any("drafter" in model.sources for model in client.models()):
            time.sleep(0.05)


def pin(stack: Stack, cores: Sequence[int]) -> None:
    """The verifier on the first core, everything else on the others, where there are others."""
    if len(cores) < 2:
        return
    for pid in stack.pids():
        own = pid in stack.pids("verifier")
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), set(cores[:1]) if own else set(cores[1:]))


def parse() -> argparse.Namespace:
    """Flags; the defaults are the figures of the docs."""
    parser = argparse.ArgumentParser(prog="outrider bench load", description=__doc__)
    parser.add_argument("--target", default=str(REPOSITORY / "models" / "target"))
    parser.add_argument("--drafter", default=str(REPOSITORY / "models" / "drafter"))
    parser.add_argument("--concurrency", default="1,2,4,8,16,32", help="streams at once, comma-separated")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--repeats", type=int, default=10, help="of every arm")
    parser.add_argument(
        "--long-prompt", type=int, default=1900, help="ids of the prompt that streams wait for"
    )
    parser.add_argument("--json", action="store_true", help="accepted for symmetry")
    return parser.parse_args()


def main() -> None:
    """Start everything, measure, print."""
    settings = parse()
    started = time.perf_counter()
    counts = [int(count) for count in settings.concurrency.split(",")]
    load = Load(load_prompts(settings.target, 24), settings.tokens)
    models = (settings.target, settings.drafter)
    cold = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # prompts come again with every arm
    whole = {**cold, "OUTRIDER_VERIFIER__PREFILL_CHUNK": "8192", "OUTRIDER_VERIFIER__PREFILL_STALL_MS": "1e9"}
    with (
        Stack(*models, **cold) as stack,
        Stack(*models, **cold, OUTRIDER_VERIFIER__BUDGET="fixed") as fixed,
        Stack(settings.target, "none", **whole) as unchunked,
    ):
        for each in (stack, fixed, unchunked):
            pin(each, sorted(os.sched_getaffinity(0)))
        arms = {
            "plain": Arm(stack.address, speculation=False),
            "fixed": Arm(fixed.address),
            "budget": Arm(stack.address),
        }
        for arm in arms.values():
            load.together(arm, 2)
        fields = concurrency_figures(load, arms, counts, settings.repeats)
        fields["faulty_drafter"] = faulty_figures(load, stack, settings.repeats)
        addresses = {"chunked": stack.address, "unchunked": unchunked.address}
        fields["longest_gap_ms"] = gap_figures(load, addresses, settings.long_prompt)
        fields["threads"] = {"verifier": 1, "drafter": 1, "orchestrator": 1}
    shown = {key: value for key, value in vars(settings).items() if key != "json"}
    print_result("load", shown, started, fields)


if __name__ == "__main__":
    main()
