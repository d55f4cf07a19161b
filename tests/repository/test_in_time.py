"""A test in which something came too late is tried again, with fixtures of its own."""

from pathlib import Path

from tests.in_time import TRIES, in_time

FOLDERS: list[Path] = []


def test_what_comes_too_late_is_tried_again(tmp_path: Path) -> None:
    FOLDERS.append(tmp_path)
    in_time(len(FOLDERS) == TRIES)
    assert len(set(FOLDERS)) == TRIES
