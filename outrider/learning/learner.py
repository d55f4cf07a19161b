"""The thread that runs lessons, has their weights judged, and swaps them in and back.

Whatever goes wrong, the service goes on with the weights it has: a lesson that fails leaves a count, a log
line and nothing else.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, get_args

from outrider.learning.due import WASTED, DueLessons
from outrider.learning.exams import chosen_exams
from outrider.learning.judge import LEAST_SESSIONS, LessonVerdict, Reason, judge
from outrider.learning.lesson import CoreMeter, LessonFailed, LessonProcess, LessonResult
from outrider.learning.order import LessonOrder
from outrider.learning.pace import LessonPace, Surroundings
from outrider.learning.passages import Passage, PassageBuffer
from outrider.learning.versions import WeightVersions
from speculative.errors import OutriderError, Unavailable

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""Seconds between two checks whether a lesson is due."""
LATE_S = 3600.0
"""Seconds after which a lesson is given up, pauses included."""
STOP_S = 10.0
"""Seconds for which `stop` waits for the thread, unless told otherwise."""
OUTCOMES = (*get_args(Reason), *WASTED, "stopped")
"""How a lesson can end: the judge's reasons, then what ends a lesson without weights."""


@dataclass(frozen=True, slots=True)
class LearnPlan:
    """How much is learnt at a time, and within which bounds.

    Attributes:
        every: wrong places that make a lesson due; after wasted lessons more, see `due`.
        steps: steps of training in a lesson.
        rate: highest learning rate.
        memory_mb: most memory of the child, in MiB.
        cores: most cores of the child.
        duty: share of the time in which the child runs, over 0 to 1.
        seconds: most processor time of a lesson, in seconds.
    """

    every: int = 512
    steps: int = 60
    rate: float = 3e-4
    memory_mb: int = 2048
    cores: int = 1
    duty: float = 0.25
    seconds: int = 600


T = TypeVar("T")


class Serving(Protocol[T]):
    """What drafts with the weights, and swaps them between two passes; called from the learner's thread."""

    @property
    def sessions(self) -> int:
        """Number of sessions that it works for now."""

    def load(self, name: str) -> T:
        """What drafts with the weights of a folder or id, as it was loaded at the start.

        Raises OutriderError, OSError or RuntimeError for weights that do not load.
        """

    def swap(self, loaded: T, version: int) -> "Future[T]":
        """Has a version draft from the next pass on; the future gets what drafted before.

        The future raises, with nothing changed, ValueError for what cannot take the place of that, and
        Unavailable once nothing drafts any more.
        """

    def discard(self, loaded: T) -> None:
        """Frees what no longer drafts, or never will."""


class Counted(Protocol):
    """Takes the counts of lessons, and the acceptance of weights; see `metrics.LearningMetrics`."""

    def ended(self, outcome: str) -> None:
        """Counts the end of one lesson."""

    def scored(self, acceptance: float) -> None:
        """Shows the acceptance of the version that serves."""

    def paused(self, seconds: float) -> None:
        """Counts the time for which a child was paused."""


class Learner(Generic[T]):
    """Runs lessons in a thread of its own, from `start` to `stop`.

    Args:
        child: module that a lesson's process runs.
        counted: takes counts.
        target: folder or id of the target that the weights belong to; empty: the weights are a whole model.
    """

    def __init__(
        self,
        plan: LearnPlan,
        buffer: PassageBuffer,
        versions: WeightVersions,
        child: str,
        counted: Counted,
        target: str = "",
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._versions = versions
        self._child = child
        self._counted = counted
        self._target = target
        self._meter = CoreMeter()
        self._due = DueLessons(plan.every)
        self._pace = LessonPace(plan.duty, plan.cores)
        self._stopped = threading.Event()
        self._lesson: LessonProcess | None = None
        self._serving: Serving[T] | None = None
        self._thread = threading.Thread(target=self._run, name="learning", daemon=True)

    def start(self, serving: Serving[T]) -> None:
        """Starts the thread, which swaps the weights of what serves."""
        self._serving = serving
        self._thread.start()

    def end_soon(self) -> None:
        """Has the lesson in hand and the thread end; returns at once."""
        self._stopped.set()
        if (lesson := self._lesson) is not None:
            lesson.stop()

    def stop(self, within_s: float = STOP_S) -> None:
        """Ends the lesson in hand and the thread; returns within `within_s` seconds.

        The folder is this process's until the thread has ended, as the thread may write to the folder.
        """
        self.end_soon()
        if self._thread.ident is None:  # never started
            self._versions.close()
        else:
            self._thread.join(within_s)

    @property
    def is_due(self) -> bool:
        """Whether enough has come for a lesson."""
        return self._buffer.fresh >= self._due.wanted

    def run_lesson(self) -> LessonVerdict | None:
        """Runs one lesson and swaps weights if it says so; None where the lesson gave nothing."""
        lessons, exams = self._buffer.take_fresh()  # first: a lesson that fails waits for new text
        candidate = self._versions.state.last + 1
        try:
            result = self._teach(lessons, chosen_exams(exams))
        except LessonFailed as failure:
            self._ended(failure.reason, str(failure), candidate)
            return None
        finally:
            self._lesson = None
        current = self._versions.state.current
        made = candidate if candidate in result.score.accepted else None
        verdict = judge(result.score, current, made, self._versions.earlier)
        told = self._told(result, verdict)
        kept = verdict.version == current or self._swap(verdict.version)
        self._counted.scored(result.score.acceptance(verdict.version if kept else current))
        if not kept:
            return None
        self._ended(verdict.reason, told, candidate)
        return verdict

    def _run(self) -> None:
        try:
            while not self._stopped.wait(CHECK_S):
                if self.is_due:
                    self._run_due()
        finally:
            self._versions.close()

    def _run_due(self) -> None:
        try:
            self.run_lesson()
        except Exception as error:
            log.exception("a lesson failed; the weights stay as they are")
            self._ended("failed", str(error), self._versions.state.last)

    def _teach(self, lessons: Sequence[Passage], exams: Sequence[Passage]) -> LessonResult:
        if len({one.session for one in exams}) < LEAST_SESSIONS:
            raise LessonFailed("too_few", f"fewer than {LEAST_SESSIONS} sessions to score with")
        try:
            candidate = self._versions.begin()
        except OSError as error:
            raise LessonFailed("failed", f"--learn-dir cannot be written to: {error}") from error
        plan, versions = self._plan, self._versions
        order = LessonOrder(
            source=versions.name_of(versions.state.current),
            others={version: versions.name_of(version) for version in versions.earlier},
            version=versions.state.current,
            out=versions.name_of(candidate),
            candidate=candidate,
            steps=plan.steps,
            rate=plan.rate,
            memory_mb=plan.memory_mb,
            cores=plan.cores,
            seconds=plan.seconds,
            target=self._target,
        )
        self._lesson = lesson = LessonProcess(
            order,
            lessons,
            exams,
            child=self._child,
            pace=self._pace,
            surroundings=self._look,
            late_s=LATE_S,
        )
        if self._stopped.is_set():
            lesson.stop()
        try:
            return lesson.run()
        finally:
            self._counted.paused(lesson.paused_s)

    def _swap(self, version: int) -> bool:
        """Has a version draft from the next pass on; False where its weights do not load."""
        serving = self._serving
        assert serving is not None, "lessons run after `start`"
        try:
            loaded = serving.load(self._versions.name_of(version))
        except (OutriderError, OSError, RuntimeError) as error:
            self._ended("unloadable", str(error), version)
            return False
        swapped = serving.swap(loaded, version)
        while True:
            try:
                before = swapped.result(CHECK_S)
            except FutureTimeout:
                if self._stopped.is_set() and swapped.cancel():
                    serving.discard(loaded)
                    return False
            except ValueError as error:
                serving.discard(loaded)
                self._ended("unloadable", str(error), version)
                return False
            except Unavailable:
                serving.discard(loaded)
                return False
            else:
                break
        self._versions.use(version)
        serving.discard(before)
        return True

    def _look(self, pid: int) -> Surroundings:
        serving = self._serving
        return Surroundings(0 if serving is None else serving.sessions, self._meter.idle(pid))

    def _told(self, result: LessonResult, verdict: LessonVerdict) -> str:
        score, gain = result.score, verdict.difference
        shares = ", ".join(f"version {one}: {score.acceptance(one):.3f}" for one in sorted(score.accepted))
        return (
            f"acceptance {shares} at {int(score.places.sum())} places of {gain.sessions} sessions; version "
            f"{verdict.version} serves, difference {gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        )

    def _ended(self, outcome: str, told: str, candidate: int) -> None:
        self._counted.ended(outcome)
        self._versions.drop()
        self._due.ended(outcome)
        level = logging.WARNING if outcome in WASTED else logging.INFO
        log.log(
            level,
            "lesson %d ended (%s): %s; the next is due after %d wrong places",
            candidate,
            outcome,
            told,
            self._due.wanted,
        )
