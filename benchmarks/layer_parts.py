"""How well the first layers of a target, or all but some layers, predict the target's tokens.

Run as `outrider bench layer_parts --json`. docs/figures.md says what each field means.
"""

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.continuations import Continuations
from outrider.lm.load.model import load_model
from outrider.pair.skipping import Skipped, search

MODES = {"greedy": 0.0, "sampled": 0.8}
"""Temperature of each mode."""
GUESSES = (1, 4)
"""Numbers of likeliest tokens that an early exit may start the next token with."""


def overlap_bound(hit: float, layer: int, layers: int) -> float:
    """Largest speed over plain decoding where the next token starts behind layer number `layer`.

    A hit hides the layers behind the exit behind the next token's first layers, on other devices (PPD) or in
    other rows of the pass (SPEED).
    """
    return 1 / (1 - hit * (1 - layer / layers))


def by_exit(texts: Continuations) -> list[dict[str, float | int]]:
    """For each number of leading layers, how often the exit behind them is right, and what that may bring."""
    rows: list[dict[str, float | int]] = []
    for layer in range(1, texts.layers):
        behind = range(layer, texts.layers)
        row: dict[str, float | int] = {"layers": layer}
        for count in GUESSES:
            hit = texts.acceptance(behind, count)
            row[f"hit_{count}"] = round(hit, 4)
            row[f"overlap_bound_{count}"] = round(overlap_bound(hit, layer, texts.layers), 3)
        exit_alone = Skipped(tuple(behind), float(row["hit_1"]), layer / texts.layers)
        row["drafting_speedup"] = round(exit_alone.speedup, 3)
        rows.append(row)
    return rows


def by_skipped(texts: Continuations) -> list[dict[str, Any]]:
    """For each number of skipped layers, the best set found, its acceptance and what that has to exceed."""
    return [
        {
            "skipped": list(one.layers),
            "acceptance": round(one.acceptance, 4),
            "break_even": round(one.cost, 4),
            "drafting_speedup": round(one.speedup, 3),
        }
        for one in search(texts, lambda kept: kept / texts.layers)
    ]


def parse() -> argparse.Namespace:
    """Parses the flags."""
    parser = command_line("layer_parts", __doc__, is_curve=True)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=8, help="number of held-out prompts")
    parser.add_argument("--tokens", type=int, default=48, help="tokens that the target writes for each")
    return parser.parse_args()


def main() -> None:
    """Measures and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    model = load_model(settings.target, device="cpu", dtype="float32")
    ids = load_prompts(settings.target, settings.prompts)
    modes = {}
    for mode, temperature in MODES.items():
        print(f"{mode}: writing the target's continuations", file=sys.stderr)
        texts = Continuations(model, ids, settings.tokens, temperature)
        modes[mode] = {"by_exit": by_exit(texts), "by_skipped": by_skipped(texts)}
    print_result("layer_parts", settings_of(settings), started, {"modes": modes}, settings.plot)


if __name__ == "__main__":
    main()
