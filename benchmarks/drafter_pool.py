"""Sessions of two verifiers beside a pool of one drafter and of two, and what a killed drafter costs them.

Run as `outrider bench drafter_pool --json`. docs/figures/drafter_pool.md says what each field means.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import TimedRun, alternating_orders, paired_ratio, same_ids, tokens_per_second
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import STOP_S, samples
from outrider.client import AsyncClient
from outrider.runtime.children import ServiceProcess, reserved_address, stop_all
from outrider.wire.names import TARGET

POOLS = (1, 2)
DRAFTER = "drafter"
PLAIN = "plain"
START_S = 180.0
BEGUN = 24
"""Tokens of each stream after which drafters are asked whom they follow, and one may die."""
LOOK_S = 0.05
"""How often the drafters are asked whom they follow."""
COLD_AND_FIXED = {
    "OUTRIDER_VERIFIER__PREFIX_CACHE": "false",  # every arm repeats the prompts
    "OUTRIDER_VERIFIER__BUDGET": "fixed",  # drafters would rest where they do not pay
    "OUTRIDER_ORCHESTRATOR__SILENT_S": "5",  # a verifier that a busy core holds up is not lost
}


class Pool:
    """Two verifiers, an orchestrator and some drafters of one name, each a process."""

    def __init__(self, models: tuple[str, str], drafters: int) -> None:
        self._held = contextlib.ExitStack()
        self._all: list[ServiceProcess] = []
        self._held.callback(lambda: stop_all(self._all, STOP_S))
        target, drafter = models
        verifiers = [self._start("verifier", "--model", target) for _ in range(2)]
        self.drafters = [self._start(DRAFTER, "--model", drafter) for _ in range(drafters)]
        for process in self._all:
            process.wait_ready(START_S)
        peers = [("verifier", verifiers), (DRAFTER, self.drafters)]
        flags = [
            text for role, group in peers for text in (f"--{role}", ",".join(one.address for one in group))
        ]
        front = self._start("orchestrator", *flags)
        front.wait_ready(START_S)
        self.address = front.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    async def count(self, name: str) -> list[int]:
        """A metric of each drafter that still runs, as `outrider_drafter_NAME`; 0 for one that was killed."""
        return list(await asyncio.gather(*(asyncio.to_thread(_metric, one, name) for one in self.drafters)))

    def _start(self, role: str, *flags: str) -> ServiceProcess:
        address = self._held.enter_context(reserved_address())
        module = role if role == "orchestrator" else f"{role}_service"
        given = ["--bind", address, "--log-level", "error", *flags]
        if role != "orchestrator":
            given += ["--threads", "1", "--passes", "eager", "--kv-mb", "256"]
        process = ServiceProcess.start(role, module, given, env=COLD_AND_FIXED | {"OMP_NUM_THREADS": "1"})
        self._all.append(process)
        return process


@dataclass(slots=True)
class Streams:
    """Streams that ran together beside a pool."""

    ids: list[list[int]]
    sources: list[list[str]]
    """What drafted each token, or the target."""
    seconds: float = 0.0
    followed: list[int] | None = None
    """Sessions that each drafter followed when every stream had BEGUN tokens."""
    seen: list[int] | None = None
    """Tokens that each stream had then."""
    killed: int | None = None
    """The drafter that was killed then."""
    moved_s: float | None = None
    """Seconds from then until the other drafters followed all sessions; None where they did not."""


class PooledStreams:
    """Runs the same streams beside pools.

    Args:
        prompts: tokens of each stream's prompt.
        tokens: tokens of each answer.
    """

    def __init__(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
        self._prompts, self._tokens = prompts, tokens
        self._begun = asyncio.Event()
        """Set once every stream has BEGUN tokens."""

    def run(self, pool: Pool, *, sources: Sequence[str] = (DRAFTER,), kill: bool = False) -> Streams:
        """Runs all streams at once; with `kill` the drafter with the most sessions dies on the way."""
        return asyncio.run(self._run(pool, sources, kill))

    async def _run(self, pool: Pool, sources: Sequence[str], kill: bool) -> Streams:
        found = Streams([[] for _ in self._prompts], [[] for _ in self._prompts])
        self._begun = asyncio.Event()
        began_s = time.perf_counter()
        async with AsyncClient(pool.address) as client:
            streams = [self._stream(client, at, found, sources) for at in range(len(self._prompts))]
            watching = asyncio.create_task(self._watch(pool, found, kill))
            await asyncio.gather(*streams)
            found.seconds = time.perf_counter() - began_s
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        return found

    async def _stream(self, client: AsyncClient, at: int, found: Streams, sources: Sequence[str]) -> None:
        request: dict[str, Any] = {
            "max_tokens": self._tokens,
            "temperature": 0.0,
            "seed": at,
            "ignore_eos": True,
        }
        request |= {"sources": list(sources)} if sources else {"speculation": False}
        async for chunk in client.stream(ids=list(self._prompts[at]), **request):
            found.ids[at] += chunk.ids
            found.sources[at] += chunk.sources
            if min(map(len, found.ids)) >= BEGUN:
                self._begun.set()

    async def _watch(self, pool: Pool, found: Streams, kill: bool) -> None:
        await self._begun.wait()
        found.followed = await pool.count("sessions")
        found.seen = [len(ids) for ids in found.ids]
        if not kill:
            return
        found.killed = max(range(len(pool.drafters)), key=found.followed.__getitem__)
        killed_s = time.perf_counter()
        os.kill(pool.drafters[found.killed].pid, signal.SIGKILL)
        await asyncio.to_thread(pool.drafters[found.killed].stop, STOP_S)
        while sum(await pool.count("sessions")) < len(found.ids):  # noqa: ASYNC110  # another process's
            await asyncio.sleep(LOOK_S)
        found.moved_s = time.perf_counter() - killed_s


def longest_without_drafts(sources: Sequence[str]) -> int:
    """The most rounds in a row that accepted no drafted token; a round ends with a token of the target."""
    longest = run = 0
    has_draft = False
    for source in sources:
        if source != TARGET:
            has_draft = True
            continue
        run = 0 if has_draft else run + 1
        longest, has_draft = max(longest, run), False
    return longest


def _metric(drafter: ServiceProcess, name: str) -> int:
    if drafter.poll() is not None:
        return 0
    return int(sum(samples(drafter.metrics, f"outrider_drafter_{name}", {})))


def pool_figures(runs: Sequence[Streams], passes: int, rows: int) -> dict[str, Any]:
    """Acceptance and spread of the streams beside a pool, whose drafters computed these passes and rows."""
    streams = [one for run in runs for one in run.sources]
    rounds = sum(one.count(TARGET) for one in streams)
    return {
        "followed": [run.followed for run in runs],
        "acceptance_length": round(sum(map(len, streams)) / rounds, 3),
        "rows_per_pass": round(rows / passes, 2) if passes else 0.0,
    }


def kill_figures(calm: Streams, harmed: Streams) -> dict[str, Any]:
    """What the streams lost beside a killed drafter, and the same streams beside the pool as it was."""
    return {
        "identical": harmed.ids == calm.ids,
        "followed": harmed.followed,
        "killed": harmed.killed,
        "moved_s": None if harmed.moved_s is None else round(harmed.moved_s, 2),
        "rounds_without_drafts": _without_drafts(harmed),
        "rounds_without_drafts_calm": _without_drafts(calm),
    }


def _without_drafts(run: Streams) -> dict[str, float] | None:
    if run.seen is None:
        return None
    found = [longest_without_drafts(one[at:]) for one, at in zip(run.sources, run.seen, strict=True)]
    return {"median": statistics.median(found), "worst": max(found)}


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    found = load_prompts(settings.target, settings.streams)
    prompts = list(itertools.islice(itertools.cycle(found), settings.streams))
    streams = PooledStreams(prompts, settings.tokens)
    timed: list[TimedRun] = []
    runs: dict[str, list[Streams]] = {}
    counts = {"passes": dict.fromkeys(map(str, POOLS), 0), "rows": dict.fromkeys(map(str, POOLS), 0)}
    with contextlib.ExitStack() as held:
        models = (settings.target, settings.drafter)
        pools = {str(count): held.enter_context(Pool(models, count)) for count in POOLS}
        for pool in pools.values():
            streams.run(pool)
        orders = alternating_orders([PLAIN, *pools])
        for repeat in range(settings.repeats):
            for arm in next(orders):
                pool = pools.get(arm, pools["1"])
                before = {name: sum(asyncio.run(pool.count(f"{name}_total"))) for name in counts}
                done = streams.run(pool, sources=() if arm == PLAIN else (DRAFTER,))
                for name, by_pool in counts.items():
                    if arm != PLAIN:
                        by_pool[arm] += sum(asyncio.run(pool.count(f"{name}_total"))) - before[name]
                ids = tuple(itertools.chain.from_iterable(done.ids))
                timed.append(TimedRun(arm, 0, repeat, ids, done.seconds))
                runs.setdefault(arm, []).append(done)
            print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr)
        harmed = streams.run(pools["2"], kill=True)
    arms = [PLAIN, *pools]
    return {
        "identical": same_ids(timed, arms),
        "tokens_per_second": {arm: tokens_per_second(run for run in timed if run.arm == arm) for arm in arms},
        "two_over_one": paired_ratio(timed, "2", "1"),
        "pools": {arm: pool_figures(runs[arm], counts["passes"][arm], counts["rows"][arm]) for arm in pools},
        "killed": kill_figures(runs["2"][-1], harmed),
    }


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("drafter_pool", (__doc__ or "").splitlines()[0])
    add_pair(parser)
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=320, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=4, help="runs of every arm")
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    print_result("drafter_pool", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
