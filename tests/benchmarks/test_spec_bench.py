"""Spec-Bench: its questions are read, its figures are computed as it does, and the benchmark runs small."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.shared.questions import Question, first_of_each_task, read_questions
from benchmarks.spec_bench.official import OVERALL, PLAIN, answer_line, figures, identical
from benchmarks.spec_bench.turns import accept_lengths, plain, template_of, vicuna
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

ROOT = Path(__file__).parents[2]
PYTHON_TASKS = ROOT / "benchmarks" / "spec_bench" / "python_tasks.jsonl"


def turn(ids: list[int], seconds: float, lengths: list[int]) -> dict[str, Any]:
    return {
        "ids": ids,
        "text": "",
        "seconds": seconds,
        "rounds": len(lengths),
        "accept_lengths": lengths,
        "accepted": {"lookup": len(ids) - len(lengths)},
    }


def test_every_step_counts_its_accepted_drafts_and_one_token_of_the_target() -> None:
    sources = ["target", "lookup", "drafter", "target", "target"]

    assert accept_lengths(sources) == [1, 3, 1]


def test_a_step_that_a_limit_cut_counts_the_token_that_the_cut_threw_away() -> None:
    assert accept_lengths(["target", "lookup", "lookup"]) == [1, 3]


def test_mat_pools_steps_and_speeds_are_means_over_questions() -> None:
    answers = {
        PLAIN: {1: [turn([7] * 4, 4.0, [1] * 4)], 2: [turn([7] * 4, 2.0, [1] * 4)]},
        "lookup": {1: [turn([7] * 4, 1.0, [4])], 2: [turn([7] * 4, 2.0, [1, 1, 2])]},
    }

    found = figures(answers, {1: "qa", 2: "rag"})

    assert list(found) == ["qa", "rag", OVERALL]
    overall = found[OVERALL]["lookup"]
    assert overall["mat"] == 2.0  # 8 tokens in 4 steps, not the mean of 4 and 1.33
    assert overall["speed"] == 3.0  # the mean of 4 and 2
    assert overall["speedup"] == 2.0  # 3 over the mean of 1 and 2, not the mean of 4 and 1
    assert overall["tokens_per_second"] == 2.67
    assert found["qa"]["lookup"]["speedup"] == 4.0
    assert identical(answers)


def test_one_other_id_is_not_identical() -> None:
    answers = {PLAIN: {1: [turn([7, 8], 1.0, [1, 1])]}, "lookup": {1: [turn([7, 9], 1.0, [2])]}}

    assert not identical(answers)


def test_an_answer_line_has_a_list_entry_for_every_turn_and_accept_lengths_for_every_step() -> None:
    (choice,) = answer_line(3, "lookup", [turn([1, 2, 3], 0.5, [2, 1]), turn([4], 0.1, [1])])["choices"]

    assert choice["new_tokens"] == [3, 1]
    assert choice["decoding_steps"] == [2, 1]
    assert choice["accept_lengths"] == [2, 1, 1]


def test_the_second_turn_sees_the_first_answer() -> None:
    assert plain(["a", "c"], ["b"]) == "abc"
    assert vicuna(["a", "c"], ["b"]).endswith(" USER: a ASSISTANT: b</s>USER: c ASSISTANT:")


def test_a_target_without_a_chat_template_is_named(tmp_path: Path) -> None:
    target = ROOT / "models" / "target"
    settings = json.loads((target / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(target / name, tmp_path)

    with pytest.raises(SystemExit, match="has no chat template"):
        template_of("chat", str(tmp_path))


def test_the_targets_own_template_has_both_turns_and_the_answer() -> None:
    prompt = template_of("chat", str(ROOT / "models" / "target"))(["first", "second"], ["answered"])

    assert prompt.index("first") < prompt.index("answered") < prompt.index("second")


def test_our_questions_are_six_tasks_of_which_one_has_two_turns() -> None:
    questions = read_questions(PYTHON_TASKS)

    assert len({question.task for question in questions}) == 6
    assert {question.task for question in questions if len(question.turns) == 2} == {"two_turns"}


def test_the_eight_categories_of_mt_bench_are_one_task() -> None:
    questions = [
        Question(1, "writing", ("a", "b")),
        Question(2, "stem", ("a", "b")),
        Question(3, "qa", ("a",)),
    ]

    assert [question.task for question in questions] == ["multi_turn", "multi_turn", "qa"]
    assert [question.number for question in first_of_each_task(questions, 1)] == [1, 3]


GOOD = json.dumps({"question_id": 1, "category": "qa", "turns": ["when?"]})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "a question is an object"),
        ('{"question_id": "1", "category": "qa", "turns": ["a"]}', "question_id is '1'"),
        ('{"question_id": 2, "turns": ["a"]}', "category is None"),
        ('{"question_id": 2, "category": "qa", "turns": []}', r"turns is \[\]"),
        ('{"question_id": 2, "category": "qa", "turns": [""]}', r"turns is \[''\]"),
        (GOOD, "question_id 1 was there before"),
    ],
)
def test_a_broken_question_is_refused_by_its_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")

    with pytest.raises(SystemExit, match=f"questions.jsonl:3: .*{why}"):
        read_questions(path)


def test_a_line_that_is_not_json_is_named_with_the_column_of_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{GOOD}\n{{7}}\n")

    why = "questions.jsonl:2 is not JSON: Expecting property name enclosed in double quotes at column 2"
    with pytest.raises(SystemExit, match=f"{why}$"):
        read_questions(path)


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n")

    with pytest.raises(SystemExit, match="no question"):
        read_questions(path)


def test_broken_questions_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("no question\n")
    command = [sys.executable, "-m", "outrider.cli", "bench", "spec-bench", "--questions", str(path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "questions.jsonl:1 is not JSON: " in done.stderr
    assert "Traceback" not in done.stderr


class Dying(GenerationServicer):
    """An orchestrator with these models that stops at the first request, in the midst of its answer."""

    def __init__(self, models: list[pb.Model]) -> None:
        self.models = models
        self.server = grpc.server(ThreadPoolExecutor(2))

    def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=self.models)

    def Generate(self, request_iterator: Any, context: Any) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(started=pb.GenerateStarted(session="s", epoch=1))
        self.server.stop(0)


@contextmanager
def dying(*models: pb.Model) -> Iterator[str]:
    """The address of an orchestrator that dies when it is asked."""
    service = Dying(list(models))
    add_GenerationServicer_to_server(service, service.server)
    port = service.server.add_insecure_port("127.0.0.1:0")
    service.server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        service.server.stop(0).wait()


def refusal_of(server: str, tmp_path: Path) -> str:
    """What the benchmark says on standard error where this server cannot be measured."""
    path = tmp_path / "questions.jsonl"
    path.write_text(GOOD)
    command = [sys.executable, "-m", "outrider.cli", "bench", "spec-bench"]
    command += ["--questions", str(path), "--server", server]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("127.0.0.1:9", "no service answers: .*"),
        ("nonsense", "the address is 'nonsense'; give host:port .*"),
    ],
)
def test_a_server_that_cannot_be_called_is_refused_in_one_line(tmp_path: Path, server: str, why: str) -> None:
    assert re.fullmatch(why + "\n", refusal_of(server, tmp_path))


def test_a_server_that_dies_amid_the_run_is_told_in_one_line(tmp_path: Path) -> None:
    model = pb.Model(name="m", sources=["lookup", "drafter"])
    with dying(model) as server:
        assert len(refusal_of(server, tmp_path).splitlines()) == 1


def test_a_server_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with dying() as server:
        assert re.fullmatch("the service has no model now; .*\n", refusal_of(server, tmp_path))


@pytest.mark.slow
def test_the_benchmark_prints_what_its_schema_says_and_reads_what_it_kept(
    bench: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    small = ["--of-each", "1", "--tokens", "16", "--sources", "lookup", "--resume", str(kept)]

    first = bench("spec-bench", *small, "--answers", str(tmp_path))
    lines = kept.read_text()
    second = bench("spec-bench", *small)

    assert first["identical"]
    assert first["tasks"][OVERALL][PLAIN]["mat"] == 1
    assert first["tasks"][OVERALL]["lookup"]["mat"] > 1
    assert len((tmp_path / "lookup.jsonl").read_text().splitlines()) == 6
    assert kept.read_text() == lines
    assert second["tasks"] == first["tasks"]
