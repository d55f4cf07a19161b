"""Measured times are kept by machine; a file that cannot be used is ignored, named and written anew."""

import json
import logging
from pathlib import Path

import pytest

from outrider.lm.autotune import times_file
from outrider.lm.autotune.choice import MEASURED_ROWS, LinearKernel
from outrider.lm.autotune.times_file import Shape, TimesFile

SHAPE = Shape(8, 4, has_bias=True)
TIMES = {kernel: dict.fromkeys(MEASURED_ROWS, 2e-6) for kernel in LinearKernel}


@pytest.fixture(autouse=True)
def a_process_that_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()


def forget() -> None:
    times_file._of_process.cache_clear()


def only_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_times_are_known_to_the_process_without_a_file() -> None:
    assert TimesFile(None).get(SHAPE) is None
    TimesFile(None).add(SHAPE, TIMES)
    assert TimesFile(None).get(SHAPE) == TIMES
    assert TimesFile(None).get(Shape(8, 4, has_bias=False)) is None


def test_times_are_known_to_a_later_process(tmp_path: Path) -> None:
    TimesFile(tmp_path / "new").add(SHAPE, TIMES)
    forget()
    assert TimesFile(tmp_path / "new").get(SHAPE) == TIMES


def test_two_processes_keep_what_both_measured(tmp_path: Path) -> None:
    other = Shape(4, 4, has_bias=False)
    TimesFile(tmp_path).add(SHAPE, TIMES)
    forget()
    TimesFile(tmp_path).add(other, TIMES)
    forget()
    assert TimesFile(tmp_path).get(SHAPE) == TimesFile(tmp_path).get(other) == TIMES


def spoiled(text: str, change: str) -> str:
    content = json.loads(text)
    times = content["times"][str(SHAPE)]
    if change == "another machine":
        content["machine"]["processor"] = "another"
    elif change == "a kernel is missing":
        del times["column"]
    elif change == "kernels differ in rows":
        del times["column"]["64"]
    elif change == "no number":
        times["row"]["1"] = "fast"
    elif change == "not finite":
        times["row"]["1"] = float("nan")
    elif change == "no table":
        content["times"] = [1]
    return text[: len(text) // 2] if change == "half" else json.dumps(content)


@pytest.mark.parametrize(
    "change",
    [
        "half",
        "another machine",
        "a kernel is missing",
        "kernels differ in rows",
        "no number",
        "not finite",
        "no table",
    ],
)
def test_a_broken_or_foreign_file_is_named_ignored_and_replaced(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    TimesFile(tmp_path).add(SHAPE, TIMES)
    path = only_file(tmp_path)
    path.write_text(spoiled(path.read_text(), change))
    forget()
    with caplog.at_level(logging.WARNING):
        found = TimesFile(tmp_path)
    assert found.get(SHAPE) is None
    assert [str(path) in record.message for record in caplog.records] == [True]
    found.add(SHAPE, TIMES)
    forget()
    assert TimesFile(tmp_path).get(SHAPE) == TIMES
    assert only_file(tmp_path) == path


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = TimesFile(tmp_path / "file")
    caplog.clear()
    for shape in (SHAPE, Shape(4, 4, has_bias=False)):
        found.add(shape, TIMES)
    assert ["are not kept" in record.message for record in caplog.records] == [True]
    assert TimesFile(None).get(SHAPE) == TIMES
