"""Where the time of one engine step goes, by part, and what the event loop costs the engine.

Run as `outrider bench step --json`. docs/figures/step.md says what each field means.
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.shared.envelope import command_line, print_result, settings_of
from benchmarks.step.client_delay import client_delay
from benchmarks.step.drafted_sessions import FOLLOWED, NODES, DraftedSessions, StepTimes
from benchmarks.step.loop_cost import loop_cost
from benchmarks.step.parts import PartTimer
from benchmarks.vocabulary.random_model import save_random_llama
from outrider.lm.runner import PackedLM
from outrider.runtime.settings import default_cache_dir
from outrider.runtime.stalls.gc_pauses import YOUNG
from speculative.params import SamplingParams
from verifier_service.engine.core import TargetPass

MODES = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8)}
PACE = FOLLOWED + 1
"""Tokens that a step commits of each session."""
UNTIMED = 3
"""Steps at the beginning of a run that are not counted."""


class StepFigures:
    """The times of one number of sessions in one mode."""

    def __init__(self, target: PackedLM, sessions: int, mode: str, steps: int) -> None:
        self._target = target
        self._sessions = sessions
        self._params = MODES[mode]
        self._tokens = PACE * (steps + UNTIMED) + 1
        self._true_ids = self._plain()

    def _plain(self) -> dict[int, list[int]]:
        run = self._new_sessions()
        run.run(None, lambda begun, times: None)
        return run.ids

    def _new_sessions(self) -> DraftedSessions:
        return DraftedSessions(self._target, self._sessions, self._params, self._tokens)

    def whole(self) -> dict[str, float]:
        """Median milliseconds of a full step's begin, forward and finish, without any part timed."""
        times: list[StepTimes] = []

        def stepped(begun: TargetPass, step: StepTimes) -> None:
            if self._is_full(begun):
                times.append(step)

        drafted = self._new_sessions()
        drafted.run(self._true_ids, stepped)
        if drafted.ids != self._true_ids:
            raise SystemExit("the drafted run's tokens differ from the plain run's")
        counted = times[UNTIMED:]
        return {
            name: round(median(getattr(step, name) for step in counted), 4)
            for name in ("begin", "forward", "finish")
        }

    def parts(self, timer: PartTimer) -> dict[str, float]:
        """Median milliseconds of each part of a full step."""

        def stepped(begun: TargetPass, step: StepTimes) -> None:
            if self._is_full(begun):
                timer.step_done()
            timer.drop()

        self._new_sessions().run(self._true_ids, stepped)
        return timer.medians()

    def _is_full(self, begun: TargetPass) -> bool:
        """Whether every session decodes in this step, with all its nodes."""
        return len(begun.parts) == self._sessions and begun.rows == self._sessions * (1 + NODES)


def step_fields(target: PackedLM, settings: argparse.Namespace) -> dict[str, Any]:
    """The times of a step by mode and number of sessions: whole first, then by part."""
    figures = {
        mode: {str(count): StepFigures(target, count, mode, settings.steps) for count in settings.sessions}
        for mode in MODES
    }
    wholes: dict[str, dict[str, list[dict[str, float]]]] = {mode: {} for mode in MODES}
    for _ in range(settings.repeats):
        for mode, by_count in figures.items():
            for count, figure in by_count.items():
                wholes[mode].setdefault(count, []).append(figure.whole())
    timer = PartTimer()
    timer.install(target)
    parts = {
        mode: {count: f.parts(timer) for count, f in by_count.items()} for mode, by_count in figures.items()
    }
    step_ms = {
        mode: {count: _least(found) for count, found in by_count.items()} for mode, by_count in wholes.items()
    }
    outside = {
        mode: {count: round(step["begin"] + step["finish"], 4) for count, step in by_count.items()}
        for mode, by_count in step_ms.items()
    }
    between = {
        mode: {count: round(max(0.0, ms - parts[mode][count]["choose"]), 4) for count, ms in by_count.items()}
        for mode, by_count in outside.items()
    }
    return {"step_ms": step_ms, "outside_forward_ms": outside, "between_ms": between, "parts_ms": parts}


def _least(found: list[dict[str, float]]) -> dict[str, float]:
    """The repeat whose time outside the forward was the least."""
    return min(found, key=lambda step: step["begin"] + step["finish"])


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("step", __doc__)
    parser.add_argument("--ids", type=int, default=4096, help="vocabulary of the model")
    parser.add_argument(
        "--sessions",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 8, 32],
        help="sessions at once, comma-separated",
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the fastest counts")
    parser.add_argument(
        "--loop-tokens", type=int, default=200, help="tokens of a stream beside the event loop; 0: none"
    )
    parser.add_argument(
        "--streams",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 8],
        help="streams at once whose tokens are followed to the client, comma-separated",
    )
    parser.add_argument(
        "--target",
        default="",
        help="model whose tokens are followed to the client; by default the small one",
    )
    parser.add_argument(
        "--passes", choices=("eager", "compiled"), default="eager", help="passes of every target"
    )
    return parser.parse_args()


def main() -> None:
    """Builds the model, drives an engine over it, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])  # as in a service
    with tempfile.TemporaryDirectory(prefix="outrider-step-") as root:
        folder = Path(root) / "random"
        save_random_llama(folder, settings.ids, True, 0.8, 0.9)
        target = PackedLM.load(folder, kv_mb=256)
        target.compile_passes(settings.passes, default_cache_dir())
        fields: dict[str, Any] = {"loop": None, "to_client": None}
        if settings.loop_tokens:
            counts, tokens = settings.sessions, settings.loop_tokens
            fields["loop"] = loop_cost(target, folder, counts, tokens, settings.repeats, settings.passes)
            print("loop: done", file=sys.stderr)
            model, counts = settings.target or str(folder), settings.streams
            fields["to_client"] = client_delay(
                model, Path(root), counts, tokens, settings.repeats, settings.passes
            )
            print("to the client: done", file=sys.stderr)
        fields |= step_fields(target, settings)
        target.close()
    print_result("step", settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
