"""Runs Spec-Bench, or questions of its format, with any sources: its figures beside ours.

Run as `outrider bench spec-bench --json`. docs/figures/spec_bench.md says what each field means.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.envelope import add_pair, command_line, print_result, settings_of
from benchmarks.shared.figures import alternating_orders
from benchmarks.shared.questions import Question, first_of_each_task, read_questions
from benchmarks.shared.resumable import ResumeFile
from benchmarks.shared.services import UpServices
from benchmarks.spec_bench.official import PLAIN, answer_line, best_by_task, figures, identical, table
from benchmarks.spec_bench.turns import TEMPLATES, TurnAsker, template_of
from outrider.client import Client
from speculative.errors import OutriderError

PYTHON_TASKS = Path(__file__).parent / "python_tasks.jsonl"
COLD: dict[str, Any] = {"OUTRIDER_VERIFIER__PREFIX_CACHE": "false"}  # every arm asks the same questions
WARM_UPS = 3
"""How often every arm answers the first question before anything is timed, as in Spec-Bench."""


@contextlib.contextmanager
def address_of(settings: argparse.Namespace) -> Iterator[str]:
    """The address of the services that are measured: those of --server, or some that run meanwhile."""
    if settings.server:
        yield settings.server
        return
    with UpServices(settings.target, settings.drafter, passes=settings.passes, **COLD) as services:
        yield services.address


def check_sources(client: Client, arms: Sequence[tuple[str, ...]]) -> None:
    """Raises SystemExit for a source that the service does not have, and where it serves no model."""
    models = client.models()
    if not models:
        raise SystemExit("the service has no model now; wait until a verifier is ready behind it")
    there = models[0].sources
    for name in (name for sources in arms for name in sources):
        if name not in there:
            raise SystemExit(f"the service has no source {name!r}; it has {', '.join(there)}")


def measure(settings: argparse.Namespace, questions: Sequence[Question], kept: ResumeFile) -> None:
    """Keeps the answers of all arms that are not there yet; arms take turns question by question.

    Raises OutriderError where the services cannot be reached, refuse a request, or are lost.
    """
    arms = arms_of(settings)
    todo = [
        (question, repeat)
        for repeat in range(settings.repeats)
        for question in questions
        if any((arm, question.number, repeat) not in kept for arm in arms)
    ]
    if not todo:
        return
    template = template_of(settings.template, settings.target)
    with address_of(settings) as address, Client(address) as client:
        check_sources(client, settings.sources)
        asker = TurnAsker(client, template, settings.tokens, settings.temperature)
        for sources in list(arms.values()) * WARM_UPS:
            asker.answer(questions[0], sources, 0)
        ask_all(asker, arms, todo, kept)


def arms_of(settings: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Sources of every arm by its name; plain decoding first."""
    return {PLAIN: (), **{"+".join(sources): sources for sources in settings.sources}}


def ask_all(
    asker: TurnAsker,
    arms: Mapping[str, tuple[str, ...]],
    todo: Sequence[tuple[Question, int]],
    kept: ResumeFile,
) -> None:
    """Asks questions with the numbers of their repeats, and keeps each answer as it comes."""
    for done, ((question, repeat), order) in enumerate(zip(todo, alternating_orders(arms), strict=False)):
        for arm in order:
            key = (arm, question.number, repeat)
            if key not in kept:
                kept.add(key, asker.answer(question, arms[arm], question.number))
        print(f"{done + 1} of {len(todo)}: question {question.number}", file=sys.stderr)


def kept_answers(
    settings: argparse.Namespace, questions: Sequence[Question], kept: ResumeFile
) -> dict[str, dict[int, Any]]:
    """The answers of all arms by question."""
    return {
        arm: {question.number: averaged(kept, arm, question, settings.repeats) for question in questions}
        for arm in arms_of(settings)
    }


def averaged(kept: ResumeFile, arm: str, question: Question, repeats: int) -> list[dict[str, Any]]:
    """A question's turns with the means of their times over all repeats."""
    runs = [kept[arm, question.number, repeat] for repeat in range(repeats)]
    return [
        turns[0] | {"seconds": sum(turn["seconds"] for turn in turns) / repeats}
        for turns in zip(*runs, strict=True)
    ]


def write_answers(folder: Path, answers: dict[str, dict[int, Any]]) -> None:
    """Writes a file of Spec-Bench's format for every arm."""
    folder.mkdir(parents=True, exist_ok=True)
    for arm, of in answers.items():
        lines = [json.dumps(answer_line(number, arm, turns)) + "\n" for number, turns in of.items()]
        (folder / f"{arm}.jsonl").write_text("".join(lines), encoding="utf-8")


def parse() -> argparse.Namespace:
    """Parses the flags."""

    def names(text: str) -> tuple[str, ...]:
        return tuple(name for name in text.split(",") if name)

    parser = command_line("spec-bench", __doc__, is_curve=True)
    add_pair(parser)
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="measure the services behind this orchestrator, with any sources; default: start the pair",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        default=PYTHON_TASKS,
        help="JSON lines of Spec-Bench's format; default: six tasks of Python code for the embedded pair",
    )
    parser.add_argument("--of-each", type=int, default=0, help="questions of each task; 0: all")
    parser.add_argument(
        "--sources",
        type=names,
        nargs="+",
        default=[("lookup",), ("drafter",), ("lookup", "drafter")],
        metavar="NAME,NAME",
        help="an arm for each: the sources that draft in it, comma-separated; plain decoding always runs",
    )
    parser.add_argument("--template", choices=TEMPLATES, default="plain", help="how turns become a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer; Spec-Bench: 1024")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, as in Spec-Bench")
    parser.add_argument("--repeats", type=int, default=1, help="runs that are averaged; Spec-Bench: 3")
    parser.add_argument("--passes", default="eager", help="our passes, as `outrider up --passes` says")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep answers here and go on from them")
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="write Spec-Bench's answer files too")
    settings = parser.parse_args()
    if settings.repeats < 1 or settings.tokens < 1 or settings.of_each < 0:
        parser.error("--repeats and --tokens must be 1 or more, --of-each 0 or more")
    return settings


def main() -> None:
    """Asks all questions, prints the table and the result."""
    settings = parse()
    started = time.perf_counter()
    questions = first_of_each_task(read_questions(settings.questions), settings.of_each)
    given = settings_of(settings, "resume", "answers") | {"questions": str(settings.questions)}
    kept = ResumeFile(settings.resume, given)
    try:
        measure(settings, questions, kept)
    except OutriderError as error:
        raise SystemExit(str(error)) from error
    answers = kept_answers(settings, questions, kept)
    tasks = {question.number: question.task for question in questions}
    found = figures(answers, tasks)
    if settings.answers is not None:
        write_answers(settings.answers, answers)
    if not settings.json:
        print(table(found))
    fields = {
        "identical": identical(answers),
        "questions": {task: list(tasks.values()).count(task) for task in dict.fromkeys(tasks.values())},
        "best_mat": best_by_task(found),
        "tasks": found,
    }
    print_result("spec_bench", given, started, fields, settings.plot)


if __name__ == "__main__":
    main()
