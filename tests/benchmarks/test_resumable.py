"""A benchmark that was cut off goes on from its file, and refuses a file that is not its own."""

from pathlib import Path

import pytest

from benchmarks.shared.resumable import ResumeFile


def test_what_was_measured_before_a_cut_is_there_after_it(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    ResumeFile(path, {"tokens": 4}).add(("arm", 1), {"rate": 2.5})

    kept = ResumeFile(path, {"tokens": 4})

    assert ("arm", 1) in kept
    assert ("arm", 2) not in kept
    assert kept["arm", 1] == {"rate": 2.5}


def test_a_line_that_was_cut_in_the_middle_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    before = ResumeFile(path, {})
    before.add(("whole",), 1)
    before.add(("cut",), 2)
    path.write_text(path.read_text()[:-4])

    kept = ResumeFile(path, {})
    kept.add(("cut",), 3)

    assert ResumeFile(path, {})["cut",] == 3
    assert len(ResumeFile(path, {})) == 2


def test_a_head_that_was_cut_in_the_middle_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('{"settings": {"tok')

    ResumeFile(path, {"tokens": 4}).add(("key",), 1)

    assert ResumeFile(path, {"tokens": 4})["key",] == 1


def test_a_file_of_other_settings_is_refused_by_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    ResumeFile(path, {"tokens": 4, "target": "a"})

    with pytest.raises(SystemExit, match="tokens = 4, and this run has 8"):
        ResumeFile(path, {"tokens": 8, "target": "a"})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"settings": {}}\n{"key"\n', ":2: this line is broken"),
        ('{"settings": {}}\n{"value": 1}\n', ":2: this is no measurement"),
        ('{"name": "load"}\n', ":1: this file holds no measurements"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text(text)

    with pytest.raises(SystemExit, match=line):
        ResumeFile(path, {})


def test_without_a_file_measurements_stay_in_memory() -> None:
    kept = ResumeFile(None, {})
    kept.add(("key",), 1)

    assert kept["key",] == 1
