"""Many requests at a time: plain decoding, all drafted nodes, and the budget; faulty drafters; long prompts.

Run as `outrider bench load --json`. docs/figures.md says what each field means.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from envelope import REPOSITORY, print_result
from figures import Run, paired_ratio, same_ids, tokens_per_second
from load_faults import faulty_figures
from load_prefill import long_prompt_figures, second_turn_figures
from offline import load_prompts
from stack import Stack
from streams import Arm, Load, interleaved, quantile

ARMS = ("plain", "fixed", "budget")
STARTS = 2
"""How often the processes of the first figures are started anew, in another order each time: which memory a
process happens to get makes it a few per cent faster or slower for good."""

COLD = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # prompts come again with every arm
WHOLE = {"OUTRIDER_VERIFIER__PREFILL_CHUNK": "8192", "OUTRIDER_VERIFIER__PREFILL_STALL_MS": "1e9"}
FIXED = {"OUTRIDER_VERIFIER__BUDGET": "fixed"}


@contextmanager
def running(models: tuple[str, str], **variables: dict[str, str]) -> Iterator[dict[str, Stack]]:
    """Stacks by name, started in this order, each with these variables."""
    with ExitStack() as held:
        stacks = {}
        for name, more in variables.items():
            stacks[name] = held.enter_context(Stack(*models, **more))
            pin(stacks[name], sorted(os.sched_getaffinity(0)))
        yield stacks


def pin(stack: Stack, cores: Sequence[int]) -> None:
    """The verifier on the first core, everything else on the others, where there are others."""
    if len(cores) < 2:
        return
    for pid in stack.pids():
        own = pid in stack.pids("verifier")
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), set(cores[:1]) if own else set(cores[1:]))


def concurrency_figures(
    load: Load, models: tuple[str, str], counts: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Rates, gaps between messages and the budget against the better of the other two."""
    runs: list[Run] = []
    gaps: dict[tuple[str, int], list[float]] = {}
    variables = {"budget": COLD, "fixed": COLD | FIXED}
    for start in range(STARTS):
        order = dict(sorted(variables.items(), reverse=bool(start % 2)))
        with running(models, **order) as stacks:
            arms = {
                "plain": Arm(stacks["budget"].address, speculation=False),
                "fixed": Arm(stacks["fixed"].address),
                "budget": Arm(stacks["budget"].address),
            }
            for arm in arms.values():
                load.together(arm, 4)
            more, between = interleaved(load, arms, counts, range(start, repeats, STARTS))
        runs += more
        for key, values in between.items():
            gaps.setdefault(key, []).extend(values)
        print(f"start {start + 1} of {STARTS}: done", file=sys.stderr)
    return _summary(runs, gaps, counts)


def _summary(
    runs: list[Run], gaps: dict[tuple[str, int], list[float]], counts: Sequence[int]
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
    """Flags; the defaults are the figures of the docs."""
    parser = argparse.ArgumentParser(prog="outrider bench load", description=__doc__)
    parser.add_argument("--target", default=str(REPOSITORY / "models" / "target"))
    parser.add_argument("--drafter", default=str(REPOSITORY / "models" / "drafter"))
    parser.add_argument("--concurrency", default="1,2,4,8,16,32", help="streams at once, comma-separated")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--repeats", type=int, default=10, help="of every arm")
    parser.add_argument(
        "--long-prompt", type=int, default=2040, help="ids of the prompt that streams wait for"
    )
    parser.add_argument("--history", type=int, default=1500, help="ids before a second turn")
    parser.add_argument("--prompts", type=int, default=5, help="long prompts and second turns")
    parser.add_argument("--untimed", type=int, default=6, help="batches that find a faulty drafter out")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry")
    return parser.parse_args()


def main() -> None:
    """Start everything, measure, print."""
    settings = parse()
    started = time.perf_counter()
    counts = [int(count) for count in settings.concurrency.split(",")]
    load = Load(load_prompts(settings.target, 24), settings.tokens)
    models = (settings.target, settings.drafter)
    fields = concurrency_figures(load, models, counts, settings.repeats)
    with running(models, faulty=COLD) as stacks:
        fields |= faulty_figures(load, stacks["faulty"], settings.repeats, settings.untimed)
    with running((settings.target, "none"), chunked=COLD, unchunked=COLD | WHOLE) as stacks:
        addresses = {name: stack.address for name, stack in stacks.items()}
        fields |= long_prompt_figures(load, addresses, settings.long_prompt, settings.prompts)
    with running(models, cached={}) as stacks:
        fields |= second_turn_figures(load, stacks["cached"], settings.history, settings.prompts)
    fields["threads"] = {"verifier": 1, "drafter": 1, "orchestrator": 1}
    shown = {key: value for key, value in vars(settings).items() if key != "json"}
    print_result("load", shown, started, fields)


if __name__ == "__main__":
    main()
