"""Measures a drafter and a head that learn while traffic shifts from one kind of text to another and back.

Run as `outrider bench learning --json`. Time is virtual: requests follow each other, and a lesson takes place
between two requests. Pairs of requests through real services then say what a learning drafter costs.
docs/figures/learning.md says what each field means.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learning.served_pairs import served_pairs
from benchmarks.learning.shift import shift_fields
from benchmarks.learning.students import DrafterStudent, HeadStudent, plain_model
from benchmarks.learning.traffic import code_prompts, prose_prompts, told
from benchmarks.shared.envelope import MODELS, add_pair, command_line, print_result, settings_of
from outrider.learning.cuts import PLACES

NAME = "learning"


def pairs_of(settings: argparse.Namespace) -> dict[str, Any] | None:
    """What learning costs requests of prose; None without a pair."""
    if not settings.pairs:
        return None
    prompts = prose_prompts(settings.target, settings.pairs).tolist()
    with tempfile.TemporaryDirectory(prefix="outrider-learning-") as folder:
        models = (settings.target, settings.drafter)
        return served_pairs(
            models, prompts, Path(folder) / "weights", every=settings.pairs_every, tokens=PLACES
        )


def main() -> None:
    """Runs the benchmark."""
    parser = command_line(NAME, __doc__)
    add_pair(parser)
    parser.add_argument(
        "--head",
        default=str(MODELS / "heads" / "eagle"),
        help="folder of a head of the target that learns, too; empty: none",
    )
    parser.add_argument("--code", type=int, default=20, help="requests of code before the shift and after it")
    parser.add_argument("--prose", type=int, default=112, help="requests of prose in between")
    parser.add_argument("--every", type=int, default=512, help="wrong places until a lesson")
    parser.add_argument("--steps", type=int, default=60, help="steps of a lesson")
    parser.add_argument("--rate", type=float, default=3e-4, help="highest learning rate")
    parser.add_argument("--buffer-kb", type=int, default=1024, help="memory for passages")
    parser.add_argument("--memory-mb", type=int, default=2048, help="memory of a lesson's process")
    parser.add_argument("--pairs", type=int, default=24, help="pairs of requests through services; 0: none")
    parser.add_argument(
        "--pairs-every", type=int, default=48, help="wrong places until a lesson, in the pairs"
    )
    settings = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)
    code, prose = (
        code_prompts(settings.target, 2 * settings.code),
        prose_prompts(settings.target, settings.prose),
    )
    prompts = np.concatenate([code[: settings.code], prose, code[settings.code :]])
    traffic = list(told(plain_model(settings.target), prompts, 1))
    fields: dict[str, Any] = {"drafter": shift_fields(DrafterStudent(settings.drafter), settings, traffic)}
    head = HeadStudent(settings.head, settings.target) if settings.head else None
    fields["head"] = None if head is None else shift_fields(head, settings, traffic)
    fields["pairs"] = pairs_of(settings)
    print_result(NAME, settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
