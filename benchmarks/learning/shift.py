"""A student whose traffic shifts from one kind of text to another, beside the same student, frozen."""

import argparse
import dataclasses
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from benchmarks.learning.students import Student, rounds
from outrider.learning.cuts import PLACES, is_exam
from outrider.learning.judge import LessonVerdict, judge
from outrider.learning.lesson import LessonFailed, LessonProcess, LessonResult
from outrider.learning.order import LessonOrder
from outrider.learning.pace import LessonPace, Surroundings
from outrider.learning.passages import Passage, PassageBuffer
from outrider.learning.versions import WeightVersions

M = TypeVar("M")


class Shift(Generic[M]):
    """A stream of requests, answered with frozen weights and with weights that learn.

    Args:
        student: what learns.
        settings: the benchmark's flags.
        folder: an empty folder for weights.
    """

    def __init__(self, student: Student[M], settings: argparse.Namespace, folder: Path) -> None:
        self._student = student
        self._settings = settings
        self._versions = WeightVersions(folder, student.given, "public", "benchmark")
        self._buffer = PassageBuffer(settings.buffer_kb * 1024)
        self._frozen = self._model = student.load(student.given)
        self.lessons: list[dict[str, Any]] = []

    def close(self) -> None:
        """Lets go of the folder."""
        self._versions.close()

    def serve(self, passages: Sequence[Passage]) -> list[dict[str, Any]]:
        """Answers requests in order; right first tokens and rounds of each one, frozen and learning."""
        served = []
        for passage in passages:
            frozen = self._student.chains(self._frozen, passage)
            learning = self._student.chains(self._model, passage)
            served.append(
                {
                    "frozen": (np.count_nonzero(frozen), rounds(frozen)),
                    "learning": (np.count_nonzero(learning), rounds(learning)),
                }
            )
            kept = dataclasses.replace(passage, wrong=learning == 0)
            self._buffer.add(kept, exam=is_exam(passage.session))
            if self._buffer.fresh >= self._settings.every:
                self._learn(passage.session)
        return served

    def _learn(self, request: int) -> None:
        versions = self._versions
        lessons, exams = self._buffer.take_fresh()
        current, candidate = versions.state.current, versions.begin()
        before = _children_s()
        result = self._lesson(lessons, exams, current, candidate)
        used_s = _children_s() - before
        verdict = judge(result.score, current, candidate, versions.earlier)
        self.lessons.append(_lesson_fields(request, result, verdict, used_s))
        if verdict.version != current:
            versions.use(verdict.version)
            self._model = self._student.load(versions.name_of(verdict.version))
        versions.drop()

    def _lesson(
        self, lessons: Sequence[Passage], exams: Sequence[Passage], current: int, candidate: int
    ) -> LessonResult:
        settings, versions = self._settings, self._versions
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
            target=self._student.target,
        )
        lesson = LessonProcess(
            order,
            lessons,
            exams,
            child=self._student.child,
            pace=LessonPace(1.0, 1),
            surroundings=lambda pid: Surroundings(0, 1.0),
            late_s=36_000,  # the child runs only where a core is idle
        )
        try:
            return lesson.run()
        except LessonFailed as failure:
            raise SystemExit(f"a lesson failed: {failure}") from failure


def shift_fields(
    student: Student[M], settings: argparse.Namespace, traffic: Sequence[Passage]
) -> dict[str, Any]:
    """What became of a student along the traffic: code, prose, then code again, as the flags say."""
    with tempfile.TemporaryDirectory(prefix="outrider-learning-") as folder:
        shift = Shift(student, settings, Path(folder))
        served = shift.serve(traffic)
        shift.close()
    begin, middle = settings.code, settings.code + settings.prose // 2
    back = settings.code + settings.prose
    phases = {
        "before": served[:begin],
        "during": served[begin:middle],
        "after": served[middle:back],
        "back": served[back:],
    }
    return {
        "phases": {name: _summary(part) for name, part in phases.items()},
        "lessons": shift.lessons,
        "swaps": sum(one["outcome"] in ("better", "earlier_better") for one in shift.lessons),
    }


def _summary(served: list[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance and tokens per round of some requests, frozen and learning."""
    places = PLACES * len(served)
    return {"requests": len(served)} | {
        arm: {
            "acceptance": round(sum(one[arm][0] for one in served) / places, 4),
            "tokens_per_round": round(places / sum(one[arm][1] for one in served), 3),
        }
        for arm in ("frozen", "learning")
    }


def _lesson_fields(
    request: int, result: LessonResult, verdict: LessonVerdict, used_s: float
) -> dict[str, Any]:
    gain = verdict.difference
    ends = [round(end, 4) if np.isfinite(end) else None for end in (gain.low, gain.high)]
    return {
        "request": request,
        "outcome": verdict.reason,
        "serves": verdict.version,
        "acceptance": {
            str(version): round(result.score.acceptance(version), 4)
            for version in sorted(result.score.accepted)
        },
        "gain": [round(gain.mean, 4), *ends],
        "loss": [round(loss, 4) for loss in result.losses],
        "processor_s": round(used_s, 1),
    }


def _children_s() -> float:
    """Processor time of all children that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
