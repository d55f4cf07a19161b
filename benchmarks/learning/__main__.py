"""Measures a learning drafter whose traffic shifts from one kind of text to another and back.

Run as `outrider bench learning --json`. Time is virtual: requests follow each other, and a lesson takes place
between two requests. Pairs of requests through real services then say what learning costs. docs/figures.md
says what each field means.
"""

import argparse
import dataclasses
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.learning.served_pairs import served_pairs
from benchmarks.learning.traffic import code_prompts, prose_prompts, told
from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from drafter_service.learning.service import CHILD
from outrider.learning.cuts import PLACES, is_exam
from outrider.learning.judge import judge
from outrider.learning.lesson import LessonFailed, LessonProcess
from outrider.learning.order import LessonOrder
from outrider.learning.pace import LessonPace, Surroundings
from outrider.learning.passages import Passage, PassageBuffer
from outrider.learning.versions import WeightVersions
from outrider.lm.load.model import load_model
from training.online import agreed_places

NAME = "learning"
CHAIN = 4
"""Length of the chain that a round drafts."""


def rounds(agreed: NDArray[np.bool_]) -> int:
    """Rounds in which a target with chains of CHAIN tokens decodes these places."""
    place = count = 0
    while place < len(agreed):
        run = 0
        while run < CHAIN and place + run < len(agreed) and agreed[place + run]:
            run += 1
        place, count = place + run + 1, count + 1
    return count


class LearningBench:
    """A stream of requests, answered with frozen weights and with weights that learn.

    Args:
        settings: the benchmark's flags.
        folder: an empty folder for weights.
    """

    def __init__(self, settings: argparse.Namespace, folder: Path) -> None:
        self._settings = settings
        self._versions = WeightVersions(folder, settings.drafter, "public", "benchmark")
        self._buffer = PassageBuffer(settings.buffer_kb * 1024)
        self._frozen = self._model = _student(settings.drafter)
        self.lessons: list[dict[str, Any]] = []

    def close(self) -> None:
        """Lets go of the folder."""
        self._versions.close()

    def serve(self, passages: list[Passage]) -> list[dict[str, Any]]:
        """Answers requests in order; counts of each one, frozen and learning."""
        served = []
        for index, passage in enumerate(passages):
            (frozen,) = agreed_places(self._frozen, [passage])
            (learning,) = agreed_places(self._model, [passage])
            served.append(
                {
                    "frozen": (int(frozen.sum()), rounds(frozen)),
                    "learning": (int(learning.sum()), rounds(learning)),
                }
            )
            kept = dataclasses.replace(passage, wrong=~learning)
            self._buffer.add(kept, exam=is_exam(passage.session))
            if self._buffer.fresh >= self._settings.every:
                self._learn(passage.session, index)
        return served

    def _learn(self, request: int, index: int) -> None:
        settings, versions = self._settings, self._versions
        lessons, exams = self._buffer.take_fresh()
        current, candidate = versions.state.current, versions.begin()
        order = LessonOrder(
            source=versions.name_of(current),
            others={version: versions.name_of(version) for version in versions.earlier},
            version=current,
            out=versions.name_of(candidate),
            candidate=candidate,
            steps=settings.steps,
            rate=settings.rate,
            memory_mb=settings.memory_mb,
            cores=1,
            seconds=600,
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            result = LessonProcess(
                order,
                lessons,
                exams,
                child=CHILD,
                pace=LessonPace(1.0, 1),
                surroundings=lambda pid: Surroundings(0, 1.0),
                late_s=600,
            ).run()
        except LessonFailed as failure:
            raise SystemExit(f"a lesson failed: {failure}") from failure
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        verdict = judge(result.score, current, candidate, versions.earlier)
        self.lessons.append(
            {
                "request": request,
                "outcome": verdict.reason,
                "serves": verdict.version,
                "acceptance": {
                    str(version): round(result.score.acceptance(version), 4)
                    for version in sorted(result.score.accepted)
                },
                "gain": [round(verdict.difference.mean, 4), *_interval(verdict.difference)],
                "loss": [round(loss, 4) for loss in result.losses],
                "processor_s": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 1),
            }
        )
        if verdict.version != current:
            versions.use(verdict.version)
            self._model = _student(versions.name_of(verdict.version))
        versions.drop()


def _interval(difference: Any) -> list[float | None]:
    return [round(end, 4) if np.isfinite(end) else None for end in (difference.low, difference.high)]


def _student(name: str) -> PreTrainedModel:
    model = load_model(name, device="cpu", dtype="float32")
    model.set_attn_implementation("sdpa")
    return model


def summary(served: list[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance and tokens per round of some requests, frozen and learning."""
    places = PLACES * len(served)
    return {"requests": len(served)} | {
        arm: {
            "acceptance": round(sum(one[arm][0] for one in served) / places, 4),
            "tokens_per_round": round(places / sum(one[arm][1] for one in served), 3),
        }
        for arm in ("frozen", "learning")
    }


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
    target = _student(settings.target)
    code, prose = (
        code_prompts(settings.target, 2 * settings.code),
        prose_prompts(settings.target, settings.prose),
    )
    stream = list(told(target, np.concatenate([code[: settings.code], prose, code[settings.code :]]), 1))
    with tempfile.TemporaryDirectory(prefix="outrider-learning-") as folder:
        bench = LearningBench(settings, Path(folder))
        served = bench.serve(stream)
        bench.close()
    shift, middle = settings.code, settings.code + settings.prose // 2
    back = settings.code + settings.prose
    phases = {
        "before": served[:shift],
        "during": served[shift:middle],
        "after": served[middle:back],
        "back": served[back:],
    }
    fields = {
        "phases": {name: summary(part) for name, part in phases.items()},
        "lessons": bench.lessons,
        "swaps": sum(one["outcome"] in ("better", "earlier_better") for one in bench.lessons),
    }
    fields["pairs"] = pairs_of(settings)
    print_result(NAME, settings_of(settings), started, fields)


if __name__ == "__main__":
    main()
