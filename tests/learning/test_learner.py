"""The thread of lessons beside what goes wrong: disks that are full, weights that do not load."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.learning.exams import MOST_EXAMS
from outrider.learning.learner import Learner, LearnPlan
from outrider.learning.metrics import LearningMetrics
from outrider.learning.passages import Passage, PassageBuffer
from outrider.learning.versions import WeightVersions
from outrider.runtime.metrics import Metrics
from speculative.errors import InvalidRequest, Unavailable

CHILD = "tests.learning.scripted_child"
PLACES = 16


def passage(session: int) -> Passage:
    ids = np.arange(PLACES + 4, dtype=np.uint32)
    tops, logprobs = np.zeros((PLACES, 0), np.uint32), np.zeros((PLACES, 0), np.float16)
    return Passage("ann", session, 0, ids, tops, logprobs, np.ones(PLACES, dtype=bool))


class Serving:
    """What drafts with weights that are a name alone."""

    sessions = 0

    def __init__(self) -> None:
        self.drafts_with = "given"
        self.refuses = False
        self.has_stopped = False
        self.discarded: list[str] = []

    def load(self, name: str) -> str:
        if self.refuses:
            raise InvalidRequest("it does not load")
        return name

    def swap(self, loaded: str, version: int) -> "Future[str]":
        before: Future[str] = Future()
        if self.has_stopped:
            before.set_exception(Unavailable("the source has stopped"))
            return before
        before.set_result(self.drafts_with)
        self.drafts_with = loaded
        return before

    def discard(self, loaded: str) -> None:
        self.discarded.append(loaded)


class School:
    """A learner whose lessons are begun by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer = PassageBuffer(1 << 20)
        self.versions = WeightVersions(folder, "given", "tenant:ann", "digest")
        self.serving = Serving()
        self.metrics = Metrics("drafter")
        self._counted = LearningMetrics(self.metrics)
        self.text()

    def learner(self, target: str = "", **plan: Any) -> Learner[str]:
        planned = LearnPlan(**{"every": PLACES, "duty": 1.0, "seconds": 60} | plan)
        learner = Learner[str](planned, self.buffer, self.versions, CHILD, self._counted, target)
        learner._serving = self.serving  # its thread begins no lesson
        return learner

    def text(self) -> None:
        """Text that makes a lesson due, and text to score with."""
        self.buffer.add(passage(99), exam=False)
        for session in range(8):
            self.buffer.add(passage(session), exam=True)

    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "outrider_drafter_lessons_total" and sample.value
        }

    def acceptance(self) -> float | None:
        return self.metrics.registry.get_sample_value("outrider_drafter_learning_acceptance")

    def fill_the_disk(self) -> None:
        """Has every write of the state fail."""
        (self.folder / "state.json.partial").mkdir()

    def empty_the_disk(self) -> None:
        (self.folder / "state.json.partial").rmdir()

    def weights(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.isdecimal())


@pytest.fixture
def school(tmp_path: Path) -> Iterator[School]:
    school = School(tmp_path / "learnt")
    yield school
    school.versions.close()


def test_a_lesson_whose_folder_cannot_be_written_to_ends_and_waits_for_new_text(school: School) -> None:
    learner = school.learner()
    due = [learner.is_due]
    school.fill_the_disk()
    assert learner.run_lesson() is None
    assert school.outcomes() == {"failed": 1}
    assert [*due, learner.is_due] == [True, False]
    assert school.serving.drafts_with == "given"


def test_weights_that_could_not_be_noted_serve_on_and_those_that_are_noted_stay(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = school.learner()
    for _ in range(2):
        learner.run_lesson()
    assert school.weights() == ["1", "2"]
    begin = school.versions.begin

    def begin_and_fill_the_disk() -> int:
        version = begin()
        school.fill_the_disk()
        return version

    monkeypatch.setattr(school.versions, "begin", begin_and_fill_the_disk)
    verdict = learner.run_lesson()
    assert verdict is not None
    assert school.serving.drafts_with == str(school.folder / "3")
    assert school.versions.state.current == verdict.version == 3, "what serves"
    assert school.weights() == ["1", "2", "3"], "a restart needs 2, and 1 to go back to"
    assert school.acceptance() == 16 / PLACES

    noted = json.loads((school.folder / "state.json").read_text())
    assert (noted["current"], noted["previous"]) == (2, 1)

    school.empty_the_disk()
    begin()
    school.versions.drop()
    assert school.weights() == ["2", "3"]
    school.versions.close()
    restarted = WeightVersions(school.folder, "given", "tenant:ann", "digest")
    assert (restarted.state.current, restarted.earlier) == (3, [0, 2])
    restarted.close()


def test_the_acceptance_that_is_shown_is_that_of_the_weights_that_serve(school: School) -> None:
    school.serving.refuses = True
    assert school.learner().run_lesson() is None
    assert school.outcomes() == {"unloadable": 1}
    assert school.acceptance() == 4 / PLACES
    assert school.weights() == []
    school.serving.refuses = False
    assert school.learner().run_lesson() is not None
    assert school.acceptance() == 12 / PLACES, "of version 2"


def test_weights_that_come_when_nothing_drafts_any_more_are_freed_and_no_lesson_has_failed(
    school: School,
) -> None:
    school.serving.has_stopped = True
    assert school.learner().run_lesson() is None
    assert school.serving.discarded == [str(school.folder / "1")]
    assert school.outcomes() == {}
    assert school.versions.state.current == 0


def test_a_lesson_scores_a_bounded_number_of_passages_however_many_are_kept(school: School) -> None:
    for session in range(MOST_EXAMS + 50):
        school.buffer.add(passage(session), exam=True)
    verdict = school.learner().run_lesson()
    assert verdict is not None
    assert verdict.difference.sessions == MOST_EXAMS


@pytest.mark.parametrize(
    "outcome", ["memory", pytest.param("late", marks=pytest.mark.slow), "failed", "unloadable"]
)
def test_a_lesson_that_comes_to_nothing_makes_the_next_one_wait_for_twice_the_text(
    school: School, outcome: str
) -> None:
    school.serving.refuses = outcome == "unloadable"
    learner = school.learner(outcome, seconds=1)
    assert learner.run_lesson() is None
    assert school.outcomes() == {outcome: 1}
    due = []
    for _ in range(2):
        school.text()
        due.append(learner.is_due)
    assert due == [False, True]
