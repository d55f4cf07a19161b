"""Ids that depend on the numerics class: the target's compiled passes beside its eager ones, row by row.

Run as `outrider bench numerics --json`. Held-out prompts are decoded several at a time, one id of each in a
pass. Eager and compiled passes, each over keys and values of their own, compute every row over the same text.
The text goes on with the id that eager passes choose, so that a difference causes no other.
docs/figures/numerics.md says what each field means.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.shared.cache_dir import kept_or_temporary
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of
from benchmarks.shared.heldout import load_prompts
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.noise import gumbel

MODES = {"greedy": 0.0, "sampled": 0.8}
"""Temperature by mode."""

NEAR = 0.1
"""Largest margin of the rows whose share says how frequent near ties are."""


@dataclass(slots=True)
class ClassComparison:
    """Rows whose ids eager and compiled passes chose over the same text, at one temperature."""

    temperature: float
    margins: list[float] = field(default_factory=list)
    """By row: eager passes' score of their own choice less their next score."""
    changes: list[float] = field(default_factory=list)
    """By row: how far the difference of those two scores is from that margin in compiled passes."""
    differing: list[int] = field(default_factory=list)
    """Indices of the rows whose ids differ."""
    logit_difference: float = 0.0
    """Largest difference of any logit."""

    def add(self, eager: NDArray[Any], compiled: NDArray[Any], noise: NDArray[Any]) -> list[int]:
        """Compares logits ``[rows, vocabulary]``, with the rows' noise; returns the ids of eager passes."""
        self.logit_difference = max(self.logit_difference, float(np.abs(eager - compiled).max()))
        own, other = (self._scores(logits, noise) for logits in (eager, compiled))
        rows = np.arange(len(own))
        chosen = own.argmax(-1)
        without = own.copy()
        without[rows, chosen] = -np.inf
        second = without.argmax(-1)
        margins = own[rows, chosen] - own[rows, second]
        changes = np.abs(other[rows, chosen] - other[rows, second] - margins)
        before = len(self.margins)
        self.differing += [before + int(row) for row in np.flatnonzero(other.argmax(-1) != chosen)]
        self.margins += margins.tolist()
        self.changes += changes.tolist()
        return [int(id_) for id_ in chosen]

    def _scores(self, logits: NDArray[Any], noise: NDArray[Any]) -> NDArray[np.float64]:
        scores = logits.astype(np.float64)
        return scores / self.temperature + noise if self.temperature else scores

    def figures(self) -> dict[str, Any]:
        """The comparison's fields, as in the schema."""
        rows, at_differences = len(self.margins), [self.margins[row] for row in self.differing]
        near = sum(margin < NEAR for margin in self.margins) / rows
        # A change in the gap of two scores, up or down, swaps them if it is larger than a margin. Near zero
        # margins are about equally frequent.
        expected = near / NEAR * statistics.mean(self.changes) / 2
        return {
            "rows": rows,
            "differing": len(self.differing),
            "other_ids_per_1000": round(1000 * len(self.differing) / rows, 4),
            "expected_other_ids_per_1000": float(f"{1000 * expected:.2g}"),
            "margins_at_differences": {
                "count": len(at_differences),
                "median": _short(statistics.median(at_differences)) if at_differences else None,
                "largest": _short(max(at_differences)) if at_differences else None,
            },
            "smallest_margin": _short(min(self.margins)),
            "median_margin": _short(statistics.median(self.margins)),
            "median_margin_change": _short(statistics.median(self.changes)),
            "largest_margin_change": _short(max(self.changes)),
            "largest_logit_difference": _short(self.logit_difference),
        }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def next_logits(lm: PackedLM, tables: Sequence[SlotTable], pieces: Sequence[Sequence[int]]) -> NDArray[Any]:
    """Logits ``[sessions, vocabulary]`` behind each session's next ids, which are committed."""
    shares = [
        SequenceRows(table, ids, range(-1, len(ids) - 1), (len(ids) - 1,))
        for table, ids in zip(tables, pieces, strict=True)
    ]
    rows = lm.forward(shares).rows().copy()
    for table, ids in zip(tables, pieces, strict=True):
        table.commit(range(len(ids)))
    return rows


def compare(
    eager: PackedLM,
    compiled: PackedLM,
    prompts: Sequence[Sequence[int]],
    flags: argparse.Namespace,
    mode: str,
) -> ClassComparison:
    """Compares the rows of the prompts' streams; a stream's seed is its prompt's index."""
    found = ClassComparison(MODES[mode])
    for low in range(0, len(prompts), flags.sessions):
        seeds = range(low, min(low + flags.sessions, len(prompts)))
        pieces: list[Sequence[int]] = [prompts[seed] for seed in seeds]
        lengths = [len(ids) + flags.tokens for ids in pieces]
        tables = {lm: [lm.table(reserve=length) for length in lengths] for lm in (eager, compiled)}
        for made in range(flags.tokens):
            rows = [next_logits(lm, own, pieces) for lm, own in tables.items()]
            noise = [gumbel(seed, len(prompts[seed]) + made, eager.vocabulary_size) for seed in seeds]
            pieces = [[id_] for id_ in found.add(rows[0], rows[1], np.stack(noise))]
        for lm, own in tables.items():
            for table in own:
                lm.release(table)
    return found


def measure(flags: argparse.Namespace, cache_dir: Path) -> dict[str, Any]:
    """All fields of the result except the envelope's."""
    eager, compiled = (PackedLM.load(flags.target, dtype="float32") for _ in range(2))
    compiled.compile_passes("compiled", cache_dir)
    prompts = [ids[-flags.prompt :] for ids in load_prompts(flags.target, flags.prompts)]
    figures = {}
    for mode in MODES:
        figures[mode] = compare(eager, compiled, prompts, flags, mode).figures()
        print(f"{mode}: {figures[mode]}", file=sys.stderr)
    compiled.close()
    return {"numerics": [eager.numerics, compiled.numerics], "streams": len(prompts), "figures": figures}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("numerics", __doc__)
    parser.add_argument("--target", default=str(MODELS / "target"), help="folder of the target model")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts, each one stream")
    parser.add_argument("--prompt", type=int, default=256, help="most tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--sessions", type=int, default=8, help="streams of a pass")
    parser.add_argument("--cache", type=Path, help="folder that keeps compiled passes for later runs")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark and prints the result."""
    flags = parse()
    started = time.perf_counter()
    with kept_or_temporary(flags.cache) as cache_dir:
        torch.set_num_threads(1)
        print_result("numerics", settings_of(flags, "cache"), started, measure(flags, cache_dir))


if __name__ == "__main__":
    main()
