"""Puts one open question of the surveys to the models: predictions first, then what was measured.

Run as `outrider bench experiments X3 --json`. docs/figures/experiments.md says what each field means.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.experiments.alignment.drafter_size import X2
from benchmarks.experiments.alignment.losses import X10
from benchmarks.experiments.alignment.shift import X11
from benchmarks.experiments.alignment.two_drafters import X22
from benchmarks.experiments.applications.added_sources import X21
from benchmarks.experiments.applications.batching import X23
from benchmarks.experiments.applications.contrastive import X20
from benchmarks.experiments.applications.corrections import X7
from benchmarks.experiments.applications.pixels import X16
from benchmarks.experiments.applications.speculative_retrieval import X19
from benchmarks.experiments.context_length import X12
from benchmarks.experiments.distance import X15
from benchmarks.experiments.draft_length import X3
from benchmarks.experiments.experiment import Experiment, Row, fields_of
from benchmarks.experiments.methods import X8
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.experiments.parallel_decoding import X9
from benchmarks.experiments.quantised import X13
from benchmarks.experiments.several_drafts import X5
from benchmarks.experiments.stopping import X6
from benchmarks.experiments.temperature import X4
from benchmarks.experiments.timing_leak import LEAK
from benchmarks.experiments.tree_memory import X14
from benchmarks.experiments.verification.rules import X17
from benchmarks.experiments.verification.strictness import X18
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.resumable import ResumeFile

EXPERIMENTS = {
    each.name: each
    for each in (
        *(X2, X3, X4, X5, X6, X7, X8, X9, X10, X11, X12, X13),
        *(X14, X15, X16, X17, X18, X19, X20, X21, X22, X23),
        LEAK,
    )
}
FULL_PROMPTS, FULL_TOKENS = 24, 128


class OutOfTime(Exception):
    """The time given to a run has passed; the message says how far the run got."""


def measured(experiment: Experiment, pair: ModelPair, kept: ResumeFile, seconds: float) -> Sequence[Row]:
    """The rows of all arms; each is kept as soon as it was measured.

    Raises:
        OutOfTime: `seconds` passed before the last arm; 0: no bound.
    """
    started = time.perf_counter()
    keys = experiment.keys(pair.scale)
    for number, key in enumerate(keys, start=1):
        if key in kept:
            continue
        if seconds and time.perf_counter() - started > seconds:
            raise OutOfTime(f"{number - 1} of {len(keys)} arms of {experiment.name} within {seconds:g} s")
        kept.add(key, experiment.measure(pair, key))
        spent = time.perf_counter() - started
        print(f"{experiment.name}: {number} of {len(keys)} at {spent:.0f} s", file=sys.stderr)
    return [kept[key] for key in keys]


def parse() -> argparse.Namespace:
    """Parses the flags."""
    parser = command_line("experiments", __doc__, is_curve=True)
    questions = "; ".join(f"{each.name}: {each.question}" for each in EXPERIMENTS.values())
    parser.add_argument(
        "experiment", choices=EXPERIMENTS, metavar="EXPERIMENT", help=f"which question. {questions}"
    )
    add_pair(parser)
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts, at most 24")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that the target writes for each")
    parser.add_argument(
        "--full", action="store_true", help="all arms, 24 prompts of 128 tokens, and no bound on time"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="start no arm later than this; 0: no bound"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep arms here and go on from them")
    settings = parser.parse_args()
    if settings.full:
        settings.prompts, settings.tokens, settings.seconds = FULL_PROMPTS, FULL_TOKENS, 0
    if settings.prompts < 2 or settings.tokens < 16:
        parser.error("--prompts must be 2 or more, and --tokens 16 or more")
    return settings


def main() -> None:
    """Measures all arms, judges the predictions and prints the result."""
    settings = parse()
    started = time.perf_counter()
    torch.set_num_threads(1)
    given = settings_of(settings, "resume", "seconds")
    kept = ResumeFile(settings.resume, given)
    scale = Scale(settings.prompts, settings.tokens, settings.full)
    pair = ModelPair(Path(settings.target), Path(settings.drafter), scale)
    experiment = EXPERIMENTS[settings.experiment]
    try:
        rows = measured(experiment, pair, kept, settings.seconds)
    except OutOfTime as cut:
        how = f"go on with --resume {settings.resume}" if settings.resume else "keep arms with --resume FILE"
        raise SystemExit(f"only {cut}: {how}") from cut
    fields = fields_of(experiment, rows)
    if not settings.json:
        for claim in fields["claims"]:
            print("holds:" if claim["holds"] else "REFUTED:", claim["predicted"])
            print("   ", claim["measured"])
    print_result("experiments", given, started, fields, settings.plot)


if __name__ == "__main__":
    main()
