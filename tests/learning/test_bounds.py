"""The bounds of a lesson's process."""

from pathlib import Path

import pytest

from outrider.learning.lesson import LessonFailed, LessonProcess
from outrider.learning.order import LessonOrder
from outrider.learning.pace import LessonPace, Surroundings


def end_of(target: str, folder: Path) -> LessonFailed:
    """How a lesson of the scripted child ends."""
    order = LessonOrder("given", {}, 0, str(folder / "1"), 1, 1, 1e-3, 2048, 1, 1, target)
    lesson = LessonProcess(
        order,
        [],
        [],
        child="tests.learning.scripted_child",
        pace=LessonPace(1.0, 1),
        surroundings=lambda pid: Surroundings(0, 8.0),
        late_s=600,
    )
    with pytest.raises(LessonFailed) as failure:
        lesson.run()
    return failure.value


@pytest.mark.slow
def test_a_lesson_that_takes_too_much_processor_time_says_so(tmp_path: Path) -> None:
    end = end_of("late", tmp_path)
    assert (end.reason, str(end)) == ("late", "the lesson took more than 1 s of processor time")


def test_no_core_of_a_lesson_is_kept_because_a_core_holds_text(tmp_path: Path) -> None:
    assert "cores (1, 1)" in str(end_of("failed", tmp_path))


def test_a_lesson_runs_only_where_a_core_is_idle(tmp_path: Path) -> None:
    assert "idle True" in str(end_of("failed", tmp_path))
