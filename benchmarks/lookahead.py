"""Measures windows of Lookahead decoding: steps of the target per token, and the cost of their rows.

Run as `outrider bench lookahead --json`. docs/figures/lookahead.md says what each field means.
"""

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.proposers.metered_engine import DecodedStreams, MeteredEngine
from benchmarks.shared.cache_dir import cache_for
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.step_profile import profile_steps
from speculative.params import SamplingParams
from verifier_service.engine.step_cost import StepCostModel
from verifier_service.proposers.lookahead import LookaheadProposer
from verifier_service.settings import VerifierSettings

NAME = "lookahead"
MODES = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(temperature=0.8)}
NODE_LIMIT = 128
"""Room for the scouts of the largest window, and for its drafts."""


def windows(text: str) -> list[tuple[int, int]]:
    """Widths and n-gram sizes, written as 5x3,10x5."""
    return [(int(width), int(size)) for width, size in (one.split("x") for one in text.split(","))]


class WindowBench:
    """Engines with a window each, beside one that decodes plainly.

    Args:
        settings: the benchmark's flags.
    """

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        # Every scout and n-gram is computed, whatever it is worth: this shows what a window can bring.
        self._verifier = VerifierSettings(
            model=settings.target,
            budget="fixed",
            threads=1,
            kv_mb=256,
            passes=settings.passes,
            cache_dir=cache_for(settings.passes),
        )
        self._prompts = load_prompts(settings.target, settings.prompts)
        plain = MeteredEngine(self._verifier, (), NODE_LIMIT)
        self._costs = StepCostModel.of(profile_steps(plain.target))
        self._plain = {mode: self._decoded(plain, mode) for mode in MODES}

    def row(self, mode: str, width: int, size: int) -> dict[str, Any]:
        """The figures of one window."""
        proposers = {NAME: LookaheadProposer(width, size)}
        engine = MeteredEngine(self._verifier, (NAME,), NODE_LIMIT, proposers=proposers)
        runs = self._decoded(engine, mode)
        rounds = sum(run.counts.rounds for run in runs)
        tokens = sum(len(run.counted) for run in runs)
        rows = 1 + sum(run.counts.nodes + run.counts.scouts for run in runs) / rounds
        cost = self._costs.expected_ms(round(rows)) / self._costs.expected_ms(1)
        return {
            "window": width,
            "ngram": size,
            "identical": [run.ids for run in runs] == [run.ids for run in self._plain[mode]],
            "steps_per_token": round(rounds / tokens, 4),
            "rows_per_step": round(rows, 2),
            "row_cost": round(cost, 3),
            "speed": round(tokens / rounds / cost, 3),
        }

    def _decoded(self, engine: MeteredEngine, mode: str) -> list[DecodedStreams]:
        tokens = self._settings.tokens
        return [
            engine.decode([prompt], tokens, MODES[mode], 1000 + at) for at, prompt in enumerate(self._prompts)
        ]


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("lookahead", __doc__, is_curve=True)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=6, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each prompt")
    parser.add_argument(
        "--passes",
        choices=("eager", "compiled"),
        default="eager",
        help="passes of the target, as `--passes` of the verifier",
    )
    parser.add_argument(
        "--windows",
        type=windows,
        default=windows("5x2,5x3,10x3,15x3,5x4,10x4,10x5,15x5"),
        help="windows as WxN: columns, and tokens of an n-gram; comma-separated",
    )
    return parser.parse_args()


def main() -> None:
    """Measures every window in both modes and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    bench = WindowBench(settings)
    modes: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for width, size in settings.windows:
        for mode, rows in modes.items():
            rows.append(bench.row(mode, width, size))
        print(f"window {width}, n-grams of {size}", file=sys.stderr)
    fields = {"identical": all(row["identical"] for rows in modes.values() for row in rows), "modes": modes}
    print_result("lookahead", settings_of(settings), started, fields, settings.plot)


if __name__ == "__main__":
    main()
