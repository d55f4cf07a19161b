"""Measures many requests at a time: plain decoding, fixed and budgeted drafts, faulty drafters, long prompts.

Run as `outrider bench load --json`. docs/figures/load.md says what each field means.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.load.fault_cost import faulty_figures
from benchmarks.load.prefill_cost import long_prompt_figures, second_turn_figures
from benchmarks.load.stream_batches import Arm, StreamBatches, interleaved
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import TimedRun, paired_ratio, quantile, same_ids, tokens_per_second
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import UpServices

ARMS = ("plain", "fixed", "budget")
COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # every arm repeats the prompts
WHOLE = {"OUTRIDER_VERIFIER__PREFILL_CHUNK": "8192", "OUTRIDER_VERIFIER__PREFILL_STALL_MS": "1e9"}
FIXED = {"OUTRIDER_VERIFIER__BUDGET": "fixed"}


@contextmanager
def running(models: tuple[str, str], **variables: dict[str, Any]) -> Iterator[dict[str, UpServices]]:
    """Running services by name, started in this order, each with its own environment variables."""
    with ExitStack() as held:
        by_name = {}
        for name, more in variables.items():
            by_name[name] = held.enter_context(UpServices(*models, **more))
            pin(by_name[name], sorted(os.sched_getaffinity(0)))
        yield by_name


def pin(services: UpServices, cores: Sequence[int]) -> None:
    """Pins the verifier to the first core and every other process to the other cores, where there are any."""
    if len(cores) < 2:
        return
    for pid in services.pids():
        own = pid in services.pids("verifier")
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), set(cores[:1]) if own else set(cores[1:]))


def concurrency_figures(
    batches: StreamBatches, models: tuple[str, str], counts: Sequence[int], starts: int, repeats: int
) -> dict[str, Any]:
    """Tokens/s and message gaps of each arm, and the budget over the better of plain and fixed.

    The processes are started anew `starts` times, in another order each time: the memory that a process
    happens to get makes it a few per cent faster or slower for good.
    """
    runs: list[TimedRun] = []
    gaps: dict[tuple[str, int], list[float]] = {}
    variables = {"budget": COLD, "fixed": COLD | FIXED}
    for start in range(starts):
        order = dict(sorted(variables.items(), reverse=bool(start % 2)))
        with running(models, **order) as by_name:
            arms = {
                "plain": Arm(by_name["budget"].address, speculation=False),
                "fixed": Arm(by_name["fixed"].address),
                "budget": Arm(by_name["budget"].address),
            }
            for arm in arms.values():
                batches.run(arm, 4)
            more, between = interleaved(batches, arms, counts, range(start, repeats, starts))
        runs += more
        for key, values in between.items():
            gaps.setdefault(key, []).extend(values)
        print(f"start {start + 1} of {starts}: done", file=sys.stderr)
    return _summary(runs, gaps, counts)


def _summary(
    runs: list[TimedRun], gaps: dict[tuple[str, int], list[float]], counts: Sequence[int]
) -> dict[str, Any]:
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


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("load", __doc__, is_curve=True)
    add_pair(parser)
    parser.add_argument(
        "--concurrency", default="1,2,4,8,16,32", help="numbers of streams at once, comma-separated"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--repeats", type=int, default=10, help="repeats of every arm, over all starts")
    parser.add_argument("--starts", type=int, default=2, help="starts of the processes that the arms use")
    parser.add_argument(
        "--long-prompt", type=int, default=2040, help="tokens of the prompt that other streams wait for"
    )
    parser.add_argument("--history", type=int, default=1500, help="tokens before a second turn")
    parser.add_argument("--prompts", type=int, default=5, help="number of long prompts, and of second turns")
    parser.add_argument(
        "--untimed", type=int, default=6, help="batches in which the verifier may notice a faulty drafter"
    )
    return parser.parse_args()


def main() -> None:
    """Starts the services, measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    counts = [int(count) for count in settings.concurrency.split(",")]
    batches = StreamBatches(load_prompts(settings.target, 24), settings.tokens)
    models = (settings.target, settings.drafter)
    fields = concurrency_figures(batches, models, counts, settings.starts, settings.repeats)
    with running(models, faulty=COLD) as by_name:
        fields |= faulty_figures(batches, by_name["faulty"], settings.repeats, settings.untimed)
    with running((settings.target, "none"), chunked=COLD, unchunked=COLD | WHOLE) as by_name:
        addresses = {name: stack.address for name, stack in by_name.items()}
        fields |= long_prompt_figures(batches, addresses, settings.long_prompt, settings.prompts)
    with running(models, cached={}) as by_name:
        fields |= second_turn_figures(batches, by_name["cached"], settings.history, settings.prompts)
    fields["threads"] = {"verifier": 1, "drafter": 1, "orchestrator": 1}
    print_result("load", settings_of(settings), started, fields, settings.plot)


if __name__ == "__main__":
    main()
