"""How well the first layers of a target, or all but some layers and sublayers, predict the target's tokens.

Run as `outrider bench layer_parts --json`. docs/figures/layer_parts.md says what each field means.
"""

import argparse
import sys
import time
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.continuations import Continuations
from outrider.lm.load.model import load_model
from outrider.lm.load.part import ModelPart
from outrider.lm.runner import PackedLM
from outrider.pair.skipping import Shares, Skipped, measure_shares, search, units_of
from outrider.skip_set import whole_layers

MODES = {"greedy": 0.0, "sampled": 0.8}
"""Temperature of each mode."""
GUESSES = (1, 4)
"""Numbers of likeliest tokens that an early exit may start the next token with."""
REPEATS = 3
"""Number of measurements of what sublayers take."""


def overlap_bound(hit: float, layer: int, layers: int) -> float:
    """Largest speed over plain decoding where the next token starts behind layer number `layer`.

    A hit hides the layers behind the exit behind the next token's first layers, on other devices (PPD) or in
    other rows of the pass (SPEED).
    """
    return 1 / (1 - hit * (1 - layer / layers))


def by_exit(texts: Continuations, shares: Shares) -> list[dict[str, float | int]]:
    """For each number of leading layers, how often the exit behind them is right, and what that may bring."""
    rows: list[dict[str, float | int]] = []
    for layer in range(1, texts.layers):
        behind = whole_layers(range(layer, texts.layers))
        row: dict[str, float | int] = {"layers": layer}
        for count in GUESSES:
            hit = texts.acceptance(behind, count)
            row[f"hit_{count}"] = round(hit, 4)
            row[f"overlap_bound_{count}"] = round(overlap_bound(hit, layer, texts.layers), 3)
        exit_alone = Skipped(behind, float(row["hit_1"]), shares.cost(behind))
        row["drafting_speedup"] = round(exit_alone.speedup, 3)
        rows.append(row)
    return rows


def by_skipped(texts: Continuations, shares: Shares, whole: bool) -> list[dict[str, Any]]:
    """For each number of skipped layers or sublayers, the best set found, its acceptance and what that has to
    exceed."""
    return [
        {
            "skipped": list(one.written),
            "sublayers": len(one.skip),
            "acceptance": round(one.acceptance, 4),
            "break_even": round(one.cost, 4),
            "drafting_speedup": round(one.speedup, 3),
        }
        for one in search(texts, units_of(texts, whole), shares.cost)
    ]


def measured_shares(target: str, in_part: bool) -> Shares:
    """What a sublayer of each kind takes of a pass of one row, in processor time: the median of a few.

    `in_part` says whether the target's layers can be skipped in part.
    """
    print("measuring passes of the target and of its parts", file=sys.stderr)

    def load(part: ModelPart | None = None) -> PackedLM:
        return PackedLM.load(target, part=part)

    whole = load()
    found = [measure_shares(whole, load, in_part, time.process_time) for _ in range(REPEATS)]
    return Shares(median(one.attention for one in found), median(one.mlp for one in found))


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
    print("writing the target's continuations", file=sys.stderr)
    by_mode = {
        mode: Continuations(model, ids, settings.tokens, temperature) for mode, temperature in MODES.items()
    }
    in_part = not any(texts.whole_only for texts in by_mode.values())
    shares = measured_shares(settings.target, in_part)
    modes = {}
    for mode, texts in by_mode.items():
        modes[mode] = {
            "by_exit": by_exit(texts, shares),
            "by_skipped": by_skipped(texts, shares, whole=True),
            "by_sublayers": by_skipped(texts, shares, whole=False),
        }
    found = {"shares": {name: round(share, 4) for name, share in asdict(shares).items()}, "modes": modes}
    print_result("layer_parts", settings_of(settings), started, found, settings.plot)


if __name__ == "__main__":
    main()
