"""Lessons in their child processes: helpful, harmful, short of memory, killed. Old weights serve on."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drafter_service.draft_tree import Growth
from drafter_service.drafters import Drafter, load
from drafter_service.learning.collector import Collector
from drafter_service.learning.service import CHILD, ServingDrafter
from drafter_service.learning.worker import LearningWorker
from drafter_service.settings import DrafterSettings
from outrider.learning.learner import Learner, LearnPlan
from outrider.learning.lesson import LessonFailed, LessonProcess
from outrider.learning.owner import LearnOwner
from outrider.learning.pace import LessonPace, Surroundings
from outrider.learning.passages import PassageBuffer
from outrider.learning.versions import WeightVersions
from outrider.source.followed import SourceProfile
from tests.drafter.support.lessons import order, taught
from tests.in_time import in_time
from tests.integration.live import until
from tests.processes import command_of
from tests.ranks import children_of

CALM = Surroundings(0, 8.0)


class Counts:
    """What a learner counted."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.acceptance: list[float] = []

    def ended(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def scored(self, acceptance: float) -> None:
        self.acceptance.append(acceptance)

    def paused(self, seconds: float) -> None:
        assert seconds >= 0


class School:
    """A learner of a real tiny model with its worker's thread, and passages that a target taught."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.counts = Counts()
        self.buffer = PassageBuffer(1 << 24)
        self.versions = WeightVersions(folder, str(model), "tenant:ann", "digest")

    def learner(self, **plan: Any) -> Learner[Drafter]:
        values: dict[str, Any] = {"steps": 40, "rate": 3e-3, "duty": 1.0, "every": 1 << 60}
        learner = Learner[Drafter](LearnPlan(**values | plan), self.buffer, self.versions, CHILD, self.counts)
        self.worker = LearningWorker(
            self._load(self.versions.name_of(self.versions.state.current)),
            SourceProfile("drafter", "tiny"),
            lambda outgoing: None,
            growth=Growth(),
            nodes_per_pass=5,
            chunk=64,
            collector=Collector(LearnOwner("ann"), self.buffer, 8),
            ended=lambda: None,
            version=self.versions.state.current,
        )
        self.thread = threading.Thread(target=self.worker.run)
        self.thread.start()
        learner.start(ServingDrafter(self.worker, self._load, self._called))
        return learner

    def teach(self, target: Path, seed: int) -> None:
        """Fills the buffer anew with what a target says."""
        self.buffer = self.buffer.__class__(1 << 24)
        for passage in taught(target, 64, seed):
            self.buffer.add(passage, exam=passage.session % 4 == 0)

    def close(self, learner: Learner[Drafter]) -> None:
        learner.stop()
        self.worker.stop()
        self.thread.join(60)

    def _called(self, version: int) -> str:
        return f"tiny (learnt {version})" if version else "tiny"

    def _load(self, name: str) -> Drafter:
        return load(DrafterSettings(model=name, threads=1, passes="eager", cache_dir=None))


@pytest.fixture
def school(tiny_llama_b: Path, tmp_path: Path) -> School:
    return School(tiny_llama_b, tmp_path / "learnt")


@pytest.mark.slow
def test_weights_are_swapped_in_where_they_help_and_back_where_traffic_turns(
    school: School, tiny_llama: Path, tiny_llama_b: Path
) -> None:
    school.teach(tiny_llama, seed=0)
    learner = school.learner()
    verdict = learner.run_lesson()
    assert verdict is not None
    assert (verdict.version, verdict.reason) == (1, "better")
    assert (school.worker.version, school.worker.profile.model) == (1, "tiny (learnt 1)")
    school.close(learner)

    again = School(school.model, school.folder)
    assert again.versions.state.current == 1, "learnt weights survive a restart"
    again.teach(tiny_llama_b, seed=5)  # now the traffic is what the given weights say
    learner = again.learner(rate=1e-9)
    verdict = learner.run_lesson()
    assert verdict is not None
    assert (verdict.version, verdict.reason) == (0, "earlier_better")
    assert again.worker.version == again.versions.state.current == 0
    assert again.counts.acceptance[-1] == 1.0
    again.close(learner)
    assert school.counts.outcomes + again.counts.outcomes == ["better", "earlier_better"]


@pytest.mark.slow
def test_a_lesson_that_harms_or_ends_early_leaves_the_old_weights(school: School, tiny_llama_b: Path) -> None:
    school.teach(tiny_llama_b, seed=0)  # the given weights are right everywhere
    learner = school.learner(steps=20, rate=3.0)
    drafter = school.worker.drafter
    learner.run_lesson()

    killed = threading.Thread(target=_kill_amid_the_weights, args=(school.folder,))
    killed.start()
    learner.run_lesson()
    killed.join()
    learner.run_lesson()
    assert school.counts.outcomes[0] == "worse"
    assert school.worker.drafter is drafter
    assert school.worker.version == school.versions.state.current == 0
    assert [path for path in school.folder.iterdir() if path.is_dir()] == []
    school.close(learner)
    in_time(school.counts.outcomes[1] == "killed", school.counts.outcomes)


def _kill_amid_the_weights(folder: Path) -> None:
    """Kills the child as soon as it has begun to write weights; it is found before, as that takes longer."""
    until(_lesson_children)
    (child,) = _lesson_children()
    deadline = time.monotonic() + 60
    while not list(folder.glob("[0-9]*.partial")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _lesson_children() -> list[int]:
    """Process ids of the children that carry lessons out."""
    return [
        pid for pid in children_of(os.getpid()) if any(b"learning.child" in word for word in command_of(pid))
    ]


@pytest.fixture
def started(tiny_llama_b: Path, tmp_path: Path) -> Callable[..., LessonProcess]:
    def start(pace: LessonPace, **given: Any) -> LessonProcess:
        wanted = order(tiny_llama_b, tmp_path / "1", **given)
        return LessonProcess(
            wanted, [], [], child=CHILD, pace=pace, surroundings=lambda pid: CALM, late_s=300
        )

    return start


def test_a_lesson_that_gets_too_little_memory_says_so(
    started: Callable[..., LessonProcess], tmp_path: Path
) -> None:
    with pytest.raises(LessonFailed) as failure:
        started(LessonPace(1.0, 1), memory_mb=70).run()
    assert failure.value.reason == "memory"
    assert list(tmp_path.iterdir()) == []


def test_a_paused_child_is_ended_where_the_machine_cannot_be_looked_at(
    tiny_llama_b: Path, tmp_path: Path
) -> None:
    looked: list[int] = []
    raised: list[OSError] = []

    def look(pid: int) -> Surroundings:
        looked.append(pid)
        if len(looked) > 1:
            raise OSError(errno.EMFILE, "Too many open files", "/proc/stat")
        return Surroundings(1, 0.0)  # busy: the child is paused

    def run() -> None:
        try:
            lesson.run()
        except OSError as error:
            raised.append(error)

    wanted = order(tiny_llama_b, tmp_path / "1")
    lesson = LessonProcess(
        wanted, [], [], child=CHILD, pace=LessonPace(1.0, 1), surroundings=look, late_s=300
    )
    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(30)
    hangs = running.is_alive()
    if hangs:
        os.kill(looked[0], signal.SIGKILL)
    assert not hangs
    assert [error.errno for error in raised] == [errno.EMFILE]
    assert not Path(f"/proc/{looked[0]}").exists()


def test_a_lesson_is_ended_at_once_while_it_is_paused(started: Callable[..., LessonProcess]) -> None:
    lesson = started(LessonPace(0.001, 1, burst_s=0.05))

    def stop_amid_a_pause() -> None:
        until(lambda: lesson.paused_s > 0.1)
        lesson.stop()

    stopping = threading.Thread(target=stop_amid_a_pause)
    stopping.start()
    with pytest.raises(LessonFailed) as failure:
        lesson.run()
    stopping.join()
    assert failure.value.reason == "stopped"
    assert lesson.paused_s > 0.1
