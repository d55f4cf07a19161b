"""X7: a target that corrects its input, which is then the draft (SAD). As `edit` drafts, and beside lookup.

The embedded target is taught to write a document anew without its wrong tokens. A document is
code, some of whose tokens were replaced by any tokens. Time is processor time of the engine's thread.
"""

import hashlib
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import LlamaForCausalLM

from benchmarks.experiments.alignment.pupils import School, school_of
from benchmarks.experiments.experiment import Experiment, Judged, Row, Rows, line
from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Panel
from benchmarks.proposers.metered_engine import DecodedStreams, MeteredEngine
from benchmarks.references import replaced
from benchmarks.shared.heldout import tokenizer_of
from benchmarks.shared.resumable import Key
from outrider.wire.names import REFERENCES
from speculative.params import SamplingParams
from training import export, tokenizer
from training.batches import scattered
from training.loop import Interrupted, Run, Settings, TrainingProgress
from training.target import logits_of
from verifier_service.settings import VerifierSettings

STEPS = {False: 160, True: 1500}
"""Steps of the lesson, by whether the experiment is run in full."""
ROWS, RATE, SHORTEST, LENGTH, MOST_REPLACED = LESSON = 4, 3e-3, 24, 96, 0.1
"""Documents of a step, the highest learning rate, tokens of the shortest and of the longest document, and the
highest share of replaced tokens. The arms' documents are as long as the longest."""
TELL_EVERY, SAVE_EVERY_S = 20, 30.0
"""Steps between two lines about the lesson, and its processor seconds between two checkpoints."""
SHARES = {False: (0, 2, 5, 10), True: (0, 1, 2, 5, 10, 20)}
"""Replaced tokens of the arms, in per cent."""
NODES = 64
PLAIN, LOOKUP, BOTH = "plain", "lookup", "both"
SOURCES: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    LOOKUP: (LOOKUP,),
    REFERENCES: (REFERENCES,),
    BOTH: (LOOKUP, REFERENCES),
}
FENCE = "\n```\n"
"""Stands before and behind a document, as `edit` looks for it."""
GREEDY = SamplingParams(temperature=0.0)


def asking(document: Sequence[int], fence: Sequence[int]) -> tuple[int, ...]:
    """The prompt that asks for a document's correction."""
    return (*fence, *document, *fence)


def lesson_step(
    clean: NDArray[np.uint16], fence: Sequence[int], vocabulary_size: int, step: int
) -> tuple[torch.Tensor, int]:
    """Prompts with their corrections, int64 [ROWS, n], and the place at which corrections begin."""
    chance = random.Random(step)
    length = chance.randint(SHORTEST, LENGTH)
    rows = []
    for row in scattered(clean, ROWS, length, seed=100 + step).tolist():
        share = chance.uniform(0, MOST_REPLACED)
        rows.append([*asking(replaced(row, share, vocabulary_size, chance.randrange(2**32)), fence), *row])
    return torch.tensor(rows), length + 2 * len(fence)


def teach(school: School, fence: Sequence[int], steps: int, folder: Path) -> LlamaForCausalLM:
    """The target after a lesson of `steps` steps, in which it corrects documents; goes on from `folder`."""
    corrector = school.pupil(school.teacher.config.num_hidden_layers)

    def loss_of(step: int, _share: float) -> torch.Tensor:
        ids, begin = lesson_step(school.source, fence, corrector.config.vocab_size, step)
        logits = logits_of(corrector, ids)[:, begin - 1 : -1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, begin:].flatten())

    def tell(progress: TrainingProgress, loss: float) -> None:
        if progress.step % TELL_EVERY == 0:
            print(f"lesson: step {progress.step} of {steps}, {loss:.3f} nats a token", file=sys.stderr)

    settings = Settings(0.0, RATE, steps, evaluate_every=float("inf"), save_every=SAVE_EVERY_S)
    try:
        Run("corrector", corrector, settings, folder, after_step=tell).train(loss_of, lambda: 0.0)
    except Interrupted as stopped:
        raise SystemExit("the lesson was interrupted; the same command goes on with it") from stopped
    corrector.eval()
    return corrector


@cache
def corrector_at(target: Path, steps: int) -> Path:
    """A folder with the target that corrects, among the temporary files, where a later run finds it."""
    tokens = tokenizer.load(target / "tokenizer.json")
    made_of = f"{target.resolve()} {(target / 'config.json').stat().st_mtime_ns} {steps} {LESSON}"
    name = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"outrider-corrector-{name}"
    if not (folder / "model").exists():
        folder.mkdir(exist_ok=True)
        staged = folder / "staged"
        export.write(teach(school_of(target), tokens.encode(FENCE).ids, steps, folder), tokens, staged)
        staged.rename(folder / "model")
    return folder / "model"


def keys(scale: Scale) -> list[Key]:
    """An arm for each share of replaced tokens."""
    return [(share,) for share in SHARES[scale.is_full]]


@cache
def engine_of(folder: str, sources: tuple[str, ...]) -> MeteredEngine:
    """An engine over the target that corrects; every node that is drafted is verified."""
    settings = VerifierSettings(model=folder, budget="fixed", threads=1, kv_mb=256, cache_dir=None)
    return MeteredEngine(settings, sources, NODES)


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Tokens a round, speed and the quality of the correction at one share of replaced tokens."""
    share = int(key[0])
    folder = str(corrector_at(pair.target_path, STEPS[pair.scale.is_full]))
    tokens = tokenizer_of(str(pair.target_path))
    fence, size = tokens.encode(FENCE).ids, tokens.get_vocab_size()
    clean = [ids[:LENGTH] for ids in pair.prompts if len(ids) >= LENGTH]
    wrong = [replaced(ids, share / 100, size, at) for at, ids in enumerate(clean)]
    done: dict[str, list[DecodedStreams]] = {
        arm: [
            engine_of(folder, sources).decode([asking(document, fence)], LENGTH, GREEDY, at, document)
            for at, document in enumerate(wrong)
        ]
        for arm, sources in SOURCES.items()
    }
    answers = [each.ids[0] for each in done[PLAIN]]
    plain_s = sum(each.seconds for each in done[PLAIN])
    row: dict[str, Any] = {"share": share, "documents": len(clean)} | quality(clean, wrong, answers)
    for arm in SOURCES:
        rounds = sum(each.counts.rounds for each in done[arm])
        row[arm] = {
            "identical": [each.ids[0] for each in done[arm]] == answers,
            "acceptance_length": round(sum(len(each.counted) for each in done[arm]) / rounds, 3),
            "over_plain": round(plain_s / sum(each.seconds for each in done[arm]), 3),
        }
    return row


def quality(
    clean: Sequence[Sequence[int]], wrong: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Of the replaced tokens: how many were there, and the share restored. Of the others: the share kept."""
    places = [
        (own != given, own == answer)
        for texts in zip(clean, wrong, answers, strict=True)
        for own, given, answer in zip(*texts, strict=True)
    ]
    restored = [is_right for was_replaced, is_right in places if was_replaced]
    kept = [is_right for was_replaced, is_right in places if not was_replaced]
    return {
        "replaced": len(restored),
        "restored": round(sum(restored) / len(restored), 3) if restored else None,
        "kept": round(sum(kept) / len(kept), 3),
    }


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    by = {row["share"]: row for row in rows}

    def edits(share: int, figure: str) -> float:
        return float(by[share][REFERENCES][figure])

    few = [row for row in rows if row["share"] <= 5]
    same = all(row[arm]["identical"] for row in rows for arm in SOURCES)
    return (
        Judged(
            f"{edits(0, 'acceptance_length'):.1f} tokens a round, {edits(0, 'over_plain'):.2f} times plain",
            edits(0, "over_plain") > 6,
        ),
        Judged(f"{edits(2, 'over_plain'):.2f}", 3 <= edits(2, "over_plain") <= 5),
        Judged(f"{edits(10, 'over_plain'):.2f}", edits(10, "over_plain") < 2),
        Judged(
            ", ".join(f"{row['share']} %: {lengths(row)}" for row in few),
            all(row[REFERENCES]["acceptance_length"] > row[LOOKUP]["acceptance_length"] for row in few),
        ),
        Judged("every arm decoded plain decoding's ids" if same else "an arm decoded other ids", same),
    )


def lengths(row: Row) -> str:
    """Tokens a round of both sources, in words."""
    return f"{row[REFERENCES]['acceptance_length']:.1f} against {row[LOOKUP]['acceptance_length']:.1f}"


def panels(rows: Rows) -> Sequence[Panel]:
    """Tokens a round and speed over the share of replaced tokens."""
    found = []
    for figure, name in (("acceptance_length", "tokens a round"), ("over_plain", "speed over plain")):
        points = [
            {"share": row["share"], arm: row[arm][figure]} for row in rows for arm in SOURCES if arm != PLAIN
        ]
        curves = tuple(
            line(arm, [point for point in points if arm in point], "share", arm)
            for arm in SOURCES
            if arm != PLAIN
        )
        found.append(Panel(name, "replaced tokens, per cent", name, curves))
    return found


X7 = Experiment(
    name="X7",
    question="What does the input as a draft bring a target that corrects its input?",
    predictions=(
        "a document without a wrong token: over 6 times plain decoding's speed",
        "2 % of the tokens replaced: 3 to 5 times",
        "10 % replaced: less than twice",
        "up to 5 %, the document as a reference has more tokens a round than lookup",
        "no arm changes a token",
    ),
    refuted_by="less than twice plain decoding's speed at 2 %: the input would be no draft worth sending",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
