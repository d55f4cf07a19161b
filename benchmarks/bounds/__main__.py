"""Computes the most that two methods could bring that are not built: kNN-LM with guesses, streamed weights.

Run as `outrider bench bounds --json`. docs/figures/bounds.md says what each field means, docs/evidence.md
what follows.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.bounds.neighbours import Datastore, accuracy, best_speed, states_of
from benchmarks.bounds.streamed import bound
from benchmarks.experiments.pair import Scale
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.heldout import held_out_records, tokenizer_of
from training.corpus import stdlib, training_files

AHEAD = (0, 1, 10)
SEARCHES = (1, 10, 100)
"""Durations of a search, in passes of the model."""


def neighbours(settings: argparse.Namespace) -> dict[str, Any]:
    """How often guessed neighbours are right, by entries ahead, and what that could bring."""
    tokenizer = tokenizer_of(settings.target)
    files = training_files(tokenizer, stdlib(), ())[0]
    held, taken = [], 0
    for _, ids in sorted(files.items()):
        held.append(ids[: settings.entries - taken])
        taken += len(held[-1])
        if taken >= settings.entries:
            break
    texts = [
        tokenizer.encode(record["prompt"] + record["continuation"]).ids[: settings.places]
        for record in held_out_records(settings.prompts)
    ]
    store = Datastore(states_of(settings.target, held, with_probabilities=False))
    text = states_of(settings.target, texts, with_probabilities=True)
    rows = {}
    for ahead in AHEAD:
        found = accuracy(store, text, ahead)
        bounds = {str(searches): best_speed(found["accuracy"], searches) for searches in SEARCHES}
        rows[str(ahead)] = found | {"bound_by_search_in_passes": bounds}
    return {"entries": len(store), "places": len(text.keys), "by_ahead": rows}


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("bounds", __doc__)
    add_pair(parser)
    parser.add_argument("--prompts", type=int, default=6, help="number of held-out texts")
    parser.add_argument("--tokens", type=int, default=96, help="tokens that the target writes for each")
    parser.add_argument("--entries", type=int, default=40_000, help="tokens in the datastore")
    parser.add_argument("--places", type=int, default=200, help="places of each text that are searched")
    parser.add_argument("--file-mb", type=int, default=256, help="size of the file that is read, in MiB")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder for that file")
    return parser.parse_args()


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """Both bounds."""
    scale = Scale(settings.prompts, settings.tokens, is_full=False)
    streamed = bound(
        Path(settings.target), Path(settings.drafter), scale, Path(settings.folder), settings.file_mb
    )
    return {"streamed_weights": streamed, "knn_lm": neighbours(settings)}


def main() -> None:
    """Measures, and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    print_result("bounds", settings_of(settings), started, measure(settings))


if __name__ == "__main__":
    main()
