"""Questions in Spec-Bench's format: JSON lines with `question_id`, `category` and `turns`.

Spec-Bench (arXiv 2401.07851) has 480 of them in six tasks; eight categories make up its first task.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MULTI_TURN = "multi_turn"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class Question:
    """One question; a conversation has several turns, each answered with the answers before it in view."""

    number: int
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """The task that Spec-Bench reports the question under."""
        return MULTI_TURN if self.category in _MT_BENCH else self.category


def read_questions(path: Path) -> list[Question]:
    """The questions of a file.

    Raises:
        SystemExit: the file is missing or empty, or a line is no question; names the line and what is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path}: the questions cannot be read: {error}") from error
    found: dict[int, Question] = {}
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            question = _question(json.loads(line))
        except json.JSONDecodeError as error:
            where = f"{path}:{line_number}"
            raise SystemExit(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
        except ValueError as error:
            raise SystemExit(f"{path}:{line_number}: {error}") from error
        if question.number in found:
            raise SystemExit(f"{path}:{line_number}: question_id {question.number} was there before")
        found[question.number] = question
    if not found:
        raise SystemExit(f"{path}: there is no question in this file")
    return list(found.values())


def first_of_each_task(questions: Sequence[Question], count: int) -> list[Question]:
    """The first `count` questions of every task, in the questions' order; all of them where `count` is 0."""
    taken: dict[str, int] = {}
    kept = []
    for question in questions:
        taken[question.task] = taken.get(question.task, 0) + 1
        if count == 0 or taken[question.task] <= count:
            kept.append(question)
    return kept


def _question(record: Any) -> Question:
    if not isinstance(record, dict):
        raise ValueError(f"a question is an object with question_id, category and turns, not {record!r:.60}")
    number, category, turns = (record.get(name) for name in ("question_id", "category", "turns"))
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"question_id is {number!r:.60}; it must be a whole number")
    if not isinstance(category, str) or not category:
        raise ValueError(f"category is {category!r:.60}; it must be the name of a task")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise ValueError(f"turns is {turns!r:.60}; it must be a list of texts that are not empty")
    return Question(number, category, tuple(turns))
