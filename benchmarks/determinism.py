"""What the deterministic profile costs, and how many ids depend on a pass's packing without it.

Run as `outrider bench determinism --json`. The embedded target reads the standard library's source in pieces.
It computes each piece in three packings: as one prefill; in trees with wrong branches beside seven other
pieces, committing the right branches; and, for the first pieces only, alone, one id at a time. Where two
packings choose different ids in a row, the margin of the first packing's choice is recorded.
docs/figures/determinism.md says what each field means.
"""

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.packed_step import CONTEXT, packed_pass
from benchmarks.shared.envelope import MODELS, command_line, print_result
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.noise import gumbel

SESSIONS = 8
PIECE_TOKENS = 256

DEPTH = 8
"""Right ids in a tree; each has one wrong sibling."""

TEMPERATURE = 0.8
DTYPES = ("float32", "bfloat16")
SHAPES = ((1, 1), (1, 16), (8, 1), (8, 16))
"""(sessions, rows each) of the timed passes."""

WARM_UP = 3
Piece = Sequence[int]


@dataclass(slots=True)
class PackingComparison:
    """Counts of the rows compared between two packings, and of the rows that differ."""

    rows: int = 0
    bits: int = 0
    differing: dict[str, int] = field(default_factory=lambda: {"greedy": 0, "sampled": 0})
    margins: dict[str, list[float]] = field(default_factory=lambda: {"greedy": [], "sampled": []})
    """Margins of the first difference in each piece, by kind of choice."""

    def add(self, one: torch.Tensor, other: torch.Tensor, noise: NDArray[np.float64]) -> None:
        """Compares the logits ``[rows, vocabulary]`` of a piece in two packings."""
        self.rows += len(one)
        self.bits += int((one != other).any(-1).sum())
        for kind, temperature, drawn in (("greedy", 1.0, 0.0), ("sampled", TEMPERATURE, noise[: len(one)])):
            scores = one.numpy().astype(np.float64) / temperature + drawn
            rival = (other.numpy().astype(np.float64) / temperature + drawn).argmax(-1)
            chosen = scores.argmax(-1)
            where = np.flatnonzero(chosen != rival)
            self.differing[kind] += len(where)
            if len(where):
                row = where[0]
                self.margins[kind].append(float(scores[row, chosen[row]] - scores[row, rival[row]]))

    def figures(self) -> dict[str, Any]:
        """The comparison's fields, as in the schema."""
        rows = {"rows": self.rows, "rows_with_other_bits": self.bits}
        return rows | {
            kind: {
                "differing": self.differing[kind],
                "first_margins": [round(margin, 6) for margin in sorted(self.margins[kind])],
            }
            for kind in self.differing
        }


def pieces(tokens: int) -> Iterator[list[Piece]]:
    """The standard library's source in batches of pieces, `tokens` tokens in all."""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    batch: list[Piece] = []
    made = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids
        for low in range(0, len(ids) - PIECE_TOKENS + 1, PIECE_TOKENS):
            batch.append(ids[low : low + PIECE_TOKENS])
            made += PIECE_TOKENS
            if len(batch) == SESSIONS or made >= tokens:
                yield batch
                batch = []
            if made >= tokens:
                return


def logits_by_prefill(lm: PackedLM, batch: list[Piece]) -> torch.Tensor:
    """Logits ``[pieces, PIECE_TOKENS, vocabulary]``, each piece in a pass of its own."""
    found = []
    for ids in batch:
        table = lm.table(reserve=len(ids))
        outcome = lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), range(len(ids)))])
        found.append(torch.from_numpy(outcome.rows()))
        lm.release(table)
    return torch.stack(found)


def logits_by_trees(lm: PackedLM, batch: list[Piece]) -> torch.Tensor:
    """Logits ``[pieces, PIECE_TOKENS, vocabulary]``, all pieces in each pass as trees with wrong siblings."""
    tables = [lm.table(reserve=PIECE_TOKENS + 2 * DEPTH) for _ in batch]
    found = []
    parents, right = [], []
    for depth in range(DEPTH):
        above = 2 * depth - 1
        parents += [above, above]
        right.append(2 * depth + 1)
    for low in range(0, PIECE_TOKENS, DEPTH):
        shares = []
        for table, ids in zip(tables, batch, strict=True):
            tokens = [id_ for own in ids[low : low + DEPTH] for id_ in ((own * 7 + 1) % 4096, own)]
            shares.append(SequenceRows(table, tokens, parents, right))
        found.append(torch.from_numpy(lm.forward(shares).rows()).view(len(batch), DEPTH, -1))
        for table in tables:
            table.keep(right)
    for table in tables:
        lm.release(table)
    return torch.cat(found, dim=1)


def logits_one_by_one(lm: PackedLM, ids: Piece) -> torch.Tensor:
    """Logits ``[PIECE_TOKENS, vocabulary]`` of plain decoding, one id a pass and no other session."""
    table = lm.table(reserve=len(ids))
    found = []
    for token in ids:
        found.append(torch.from_numpy(lm.forward([SequenceRows(table, [token], [-1], [0])]).rows()))
        table.commit([0])
    lm.release(table)
    return torch.cat(found)


def differences(lm: PackedLM, tokens: int, singly: int) -> dict[str, Any]:
    """Fields of the comparisons; `singly` rows are also compared with decoding one id at a time."""
    noise = np.stack([gumbel(0, position, lm.vocabulary_size) for position in range(PIECE_TOKENS)])
    counts = {"prefill_and_trees": PackingComparison(), "alone_and_trees": PackingComparison()}
    for batch in pieces(tokens):
        one, trees = logits_by_prefill(lm, batch), logits_by_trees(lm, batch)
        for at, ids in enumerate(batch):
            counts["prefill_and_trees"].add(one[at], trees[at], noise)
            if counts["alone_and_trees"].rows < singly:
                counts["alone_and_trees"].add(logits_one_by_one(lm, ids), trees[at], noise)
    return {name: count.figures() for name, count in counts.items()}


def costs(without: PackedLM, under: PackedLM, repeats: int) -> dict[str, Any]:
    """Median milliseconds of passes with and without the profile, taking turns, and of each pair's ratio."""
    found = {}
    for sessions, rows in SHAPES:
        cases = [packed_pass(lm, sessions, rows) for lm in (without, under)]
        pairs = [tuple(case() for case in cases) for _ in range(repeats + WARM_UP)][WARM_UP:]
        found[f"{sessions}x{rows}"] = {
            "without_ms": round(statistics.median(own for own, _ in pairs), 3),
            "with_ms": round(statistics.median(tiled for _, tiled in pairs), 3),
            "ratio": round(statistics.median(tiled / own for own, tiled in pairs), 3),
        }
    return found


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """All fields of the result except the envelope's, by dtype."""
    fields: dict[str, Any] = {"cost": {}, "without_profile": {}, "with_profile": {}}
    for dtype in DTYPES:
        source = MODELS / "target"
        without = PackedLM.load(source, dtype=dtype)
        under = PackedLM.load(source, dtype=dtype, deterministic=True)
        fields["cost"][dtype] = costs(without, under, settings.repeats)
        print(f"{dtype}: {fields['cost'][dtype]}", file=sys.stderr)
        for name, lm, singly in (
            ("without_profile", without, settings.alone),
            ("with_profile", under, settings.alone_with),
        ):
            found = fields[name][dtype] = differences(lm, settings.tokens, singly)
            for pair, counts in found.items():
                greedy, sampled = counts["greedy"]["differing"], counts["sampled"]["differing"]
                print(
                    f"{dtype} {name} {pair}: of {counts['rows']} rows {counts['rows_with_other_bits']} have "
                    f"other bits, {greedy} another greedy id, {sampled} another sampled one",
                    file=sys.stderr,
                )
    return fields


def main() -> None:
    """Measures, reports to stderr and prints the result as the last line of stdout."""
    parser = command_line("determinism", __doc__)
    parser.add_argument("--tokens", type=int, default=50_000, help="rows compared (default 50000)")
    parser.add_argument(
        "--alone", type=int, default=1000, help="rows also decoded alone, without the profile (default 1000)"
    )
    parser.add_argument(
        "--alone-with",
        type=int,
        default=1000,
        help="rows also decoded alone, under the profile (default 1000)",
    )
    parser.add_argument("--repeats", type=int, default=40, help="repeats of each timed pass (default 40)")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    shape = {
        "tokens": settings.tokens,
        "alone": settings.alone,
        "alone_with": settings.alone_with,
        "repeats": settings.repeats,
        "context": CONTEXT,
        "temperature": TEMPERATURE,
        "threads": 1,
    }
    print_result("determinism", shape, started, measure(settings))


if __name__ == "__main__":
    main()
