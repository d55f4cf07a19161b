"""Spec-Bench's figures beside ours, from the answers of all arms. Pure.

Spec-Bench: MAT is the mean of accept lengths over all steps of all questions; a question's speed is its new
tokens over its seconds, over all turns; a task's speed is the plain mean over its questions; a speedup is
the ratio of two such means; "overall" pools all questions. Ours: completion tokens over rounds, and summed
tokens over summed seconds.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.shared.figures import median_of_pairs

PLAIN = "plain"
OVERALL = "overall"
Turns = Sequence[Mapping[str, Any]]
Answers = Mapping[str, Mapping[int, Turns]]
"""Turns of each question, by arm and question number."""


def speed(turns: Turns) -> float:
    """Spec-Bench's speed of a question: new tokens over seconds, over all its turns."""
    seconds: float = sum(turn["seconds"] for turn in turns)
    return sum(len(turn["ids"]) for turn in turns) / seconds


def arm_figures(turns_of_questions: Sequence[Turns], plain: Sequence[Turns]) -> dict[str, Any]:
    """The figures of one arm over some questions, beside plain decoding's answers to the same questions."""
    turns = [turn for each in turns_of_questions for turn in each]
    lengths = [length for turn in turns for length in turn["accept_lengths"]]
    tokens, rounds = sum(len(turn["ids"]) for turn in turns), sum(turn["rounds"] for turn in turns)
    official_speed = mean(map(speed, turns_of_questions))
    accepted: dict[str, int] = {}
    for turn in turns:
        for name, count in turn["accepted"].items():
            accepted[name] = accepted.get(name, 0) + count
    return {
        "mat": round(mean(lengths), 3),
        "speed": round(official_speed, 2),
        "speedup": round(official_speed / mean(map(speed, plain)), 3),
        "acceptance_length": round(tokens / rounds, 3),
        "tokens_per_second": round(tokens / sum(turn["seconds"] for turn in turns), 2),
        "over_plain": median_of_pairs(
            speed(own) / speed(other) for own, other in zip(turns_of_questions, plain, strict=True)
        ),
        "accepted_share": {name: round(count / tokens, 3) for name, count in sorted(accepted.items())},
    }


def figures(answers: Answers, tasks: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Figures by task and arm, and under `overall` those of all questions pooled.

    Args:
        tasks: the task of each question, by its number.
    """
    found = {}
    for task in (*dict.fromkeys(tasks.values()), OVERALL):
        numbers = [number for number, of in tasks.items() if task in (of, OVERALL)]
        plain = [answers[PLAIN][number] for number in numbers]
        found[task] = {
            arm: arm_figures([of[number] for number in numbers], plain) for arm, of in answers.items()
        }
    return found


def identical(answers: Answers) -> bool:
    """Whether every arm gave plain decoding's ids to every turn."""
    return all(
        [turn["ids"] for turn in of[number]] == [turn["ids"] for turn in turns]
        for of in answers.values()
        for number, turns in answers[PLAIN].items()
    )


def best_by_task(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """The arm of the greatest MAT in each task."""
    return {task: max(arms, key=lambda arm: arms[arm]["mat"]) for task, arms in found.items()}


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A table for people: a row for each arm, MAT and speedup in each task."""
    arms = list(found[OVERALL])
    width = max(map(len, arms))
    lines = [" " * width + "".join(f" {task:>14}" for task in found)]
    for arm in arms:
        cells = (f"{of[arm]['mat']:.2f} {of[arm]['speedup']:.2f}x" for of in found.values())
        lines.append(f"{arm:<{width}}" + "".join(f" {cell:>14}" for cell in cells))
    return "\n".join(lines)


def answer_line(number: int, arm: str, turns: Turns) -> dict[str, Any]:
    """A question's answers as a line of the file that Spec-Bench's own scripts read."""
    return {
        "question_id": number,
        "answer_id": f"{arm}-{number}",
        "model_id": arm,
        "choices": [
            {
                "index": 0,
                "turns": [turn["text"] for turn in turns],
                "decoding_steps": [len(turn["accept_lengths"]) for turn in turns],
                "new_tokens": [len(turn["ids"]) for turn in turns],
                "wall_time": [turn["seconds"] for turn in turns],
                "accept_lengths": [length for turn in turns for length in turn["accept_lengths"]],
            }
        ],
    }
