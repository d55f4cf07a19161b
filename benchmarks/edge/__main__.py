"""Measures how a client's device is best used at several distances from the cloud.

Run as `outrider bench edge --json`. docs/figures/edge.md says what each field means.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.edge.arms import ARMS, FIXED, EdgeArm, EdgeRun, ModelShare
from benchmarks.edge.delayed_link import DelayedLink
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import alternating_orders
from benchmarks.shared.heldout import load_prompts
from benchmarks.shared.services import UpServices
from outrider.edge.backends import DraftModel, open_model
from outrider.edge.controller import WINDOW
from outrider.edge.latency_model import Conditions, Mode, best_window, predict, window_of_a_pass

COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # every arm repeats the prompts
SLOWER = 1.05
"""Times the cloud's time per token that the automatic arm may take."""


def distances(text: str) -> list[tuple[float, float]]:
    """Round trips in ms with shares of lost segments, from text such as 1,20,50@0.01."""
    found = []
    for part in text.split(","):
        rtt_ms, _, loss = part.partition("@")
        found.append((float(rtt_ms), float(loss or 0)))
    return found


def measure(
    address: str,
    model: DraftModel,
    distance: tuple[float, float],
    prompts: Sequence[Sequence[int]],
    flags: Any,
) -> list[EdgeRun]:
    """All arms at one distance, in turn on each prompt, each with a connection of its own.

    The cloud alone runs first and last on each prompt: the two show how exact a ratio of times is.
    """
    rtt_ms, loss = distance
    users: list[ModelShare] = []
    orders = alternating_orders((*ARMS, ARMS[0]))
    with DelayedLink(address, rtt_ms, loss) as link, ExitStack() as held:
        arms = {arm: EdgeArm(arm, link.address, ModelShare(model, users)) for arm in ARMS}
        for arm in arms.values():
            held.callback(arm.close)
        runs = [
            arms[arm].run(number, prompt, flags.tokens, flags.temperature)
            for (number, prompt), order in zip(enumerate(prompts), orders, strict=False)
            for arm in order
        ]
    print(
        f"{rtt_ms:g} ms, loss {loss:g}: { ({arm: round(pace(runs, arm), 1) for arm in ARMS}) }",
        file=sys.stderr,
    )
    return runs


def pace(runs: Sequence[EdgeRun], arm: str) -> float:
    """Milliseconds per token of an arm, over all its requests."""
    own = [run for run in runs if run.arm == arm]
    return sum(run.ms for run in own) / sum(run.timed for run in own)


def cloud_over_cloud(runs: Sequence[EdgeRun]) -> float:
    """Time per token of the cloud's second answers to the prompts over that of its first answers."""
    own = [run for run in runs if run.arm == "cloud"]
    return pace(own[1::2], "cloud") / pace(own[::2], "cloud")


def rounds(runs: Sequence[EdgeRun], arm: str) -> float:
    """Passes of the target per token."""
    own = [run for run in runs if run.arm == arm]
    return sum(run.rounds for run in own) / sum(len(run.ids) for run in own)


def conditions_of(runs: Sequence[EdgeRun]) -> Conditions:
    """Conditions for the latency model: the cloud's own pace, and what devices measured in fixed modes."""
    drafted = [run for run in runs if run.arm in FIXED[1:]]

    def seen(name: str) -> float:
        values = [run.measured[name] for run in drafted]
        return median(value for value in values if isinstance(value, float))

    cloud_ms = pace(runs, "cloud")
    return Conditions(acceptance(drafted), seen("draft_ms"), cloud_ms, seen("rtt_ms"))


def acceptance(runs: Sequence[EdgeRun]) -> float:
    """Share of the drafted tokens, over whole answers, that the target chose as well.

    A device's own estimate counts the latest tokens most, so it speaks of how answers end.
    """
    equal = sum(run.device.equal for run in runs)
    return equal / max(1, equal + sum(run.device.wrong for run in runs))


def predicted(at: Conditions) -> dict[str, float]:
    """Milliseconds per token of each mode, as the latency model predicts."""
    windows = {Mode.WAITING: best_window(at, WINDOW), Mode.PIPELINED: window_of_a_pass(at, WINDOW)}
    found = {mode.value: predict(mode, at, windows.get(mode, WINDOW)).ms_per_token for mode in Mode}
    return found | {"automatic": min(found.values())}


def figures(by_distance: Sequence[Sequence[EdgeRun]]) -> dict[str, Any]:
    """The fields of the result; lists have an entry for each distance."""
    conditions = [conditions_of(runs) for runs in by_distance]
    models = [predicted(at) for at in conditions]
    expected = {run.prompt: run.ids for run in by_distance[0] if run.arm == "cloud"}
    drafted = [run for runs in by_distance for run in runs if run.arm == "pipelined"]
    tokens = sum(len(run.ids) for run in drafted)
    ratios = [pace(runs, "automatic") / pace(runs, "cloud") for runs in by_distance]
    return {
        "identical": all(run.ids == expected[run.prompt] for runs in by_distance for run in runs),
        "ms_per_token": {arm: [round(pace(runs, arm), 2) for runs in by_distance] for arm in ARMS},
        "predicted_ms_per_token": {
            arm: [round(model[arm], 2) for model in models] for arm in (*FIXED, "automatic")
        },
        "rounds_per_token": {arm: [round(rounds(runs, arm), 3) for runs in by_distance] for arm in ARMS},
        "automatic_over_cloud": [round(ratio, 3) for ratio in ratios],
        "cloud_over_cloud": [round(cloud_over_cloud(runs), 3) for runs in by_distance],
        "automatic_within_bound": all(ratio <= SLOWER for ratio in ratios),
        "automatic_modes": [
            [run.device.mode for run in runs if run.arm == "automatic"] for runs in by_distance
        ],
        "bytes_per_token": {
            "up": round(sum(run.device.bytes_up for run in drafted) / tokens, 1),
            "down": round(sum(run.device.bytes_down for run in drafted) / tokens, 1),
        },
        "acceptance": [round(at.acceptance, 3) for at in conditions],
        "draft_ms": [round(at.draft_ms, 2) for at in conditions],
        "measured_rtt_ms": [round(at.rtt_ms, 1) for at in conditions],
    }


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = command_line("edge", __doc__, is_curve=True)
    add_pair(parser)
    parser.add_argument(
        "--distances",
        type=distances,
        default=distances("1,20,50,100,200,50@0.01"),
        metavar="MS[@LOSS],…",
        help="round trips in ms, each with the share of segments lost; default 1,20,50,100,200,50@0.01",
    )
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts of each arm; default 6")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer; default 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0, greedy")
    flags: argparse.Namespace = parser.parse_args()
    started = time.perf_counter()
    prompts = load_prompts(flags.target, flags.prompts)
    model = open_model(flags.drafter)
    try:
        with UpServices(flags.target, "none", **COLD) as services:
            by_distance = [measure(services.address, model, one, prompts, flags) for one in flags.distances]
    finally:
        model.close()
    places = {
        "rtt_ms": [rtt_ms for rtt_ms, _ in flags.distances],
        "loss": [loss for _, loss in flags.distances],
    }
    print_result("edge", settings_of(flags, "distances"), started, places | figures(by_distance), flags.plot)


if __name__ == "__main__":
    main()
