"""Values of files are read again when the files change."""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.wire.reloading import Reloaded
from speculative.errors import InvalidRequest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def number(contents: Mapping[str, bytes]) -> int:
    try:
        return int(contents["number_file"])
    except ValueError as error:
        raise InvalidRequest("number_file: it holds no number; write one") from error


def reloaded(path: Path, clock: Clock) -> Reloaded[int]:
    return Reloaded({"number_file": path}, number, every_s=1.0, clock=clock)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "n", Clock()
    path.write_text("1")
    value = reloaded(path, clock)
    path.write_text("23")
    assert value.current() == 1, "it is not looked at for each question"
    clock.now = 1.0
    assert value.current() == 23


def test_a_file_that_is_replaced_as_kubernetes_does_is_read_again(tmp_path: Path) -> None:
    for version in "12":
        (tmp_path / version).mkdir()
        (tmp_path / version / "n").write_text(version)
    link, clock = tmp_path / "data", Clock()
    link.symlink_to("1")
    value = reloaded(link / "n", clock)
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").rename(link)
    clock.now = 1.0
    assert value.current() == 2


@pytest.mark.parametrize("damage", ["rubbish", None])
def test_an_invalid_file_is_logged_once_and_the_former_value_stays_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str | None
) -> None:
    path, clock = tmp_path / "n", Clock()
    path.write_text("1")
    value = reloaded(path, clock)
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    for _ in range(3):
        clock.now += 1
        assert value.current() == 1
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "number_file" in message
    assert "goes on" in message
    path.write_text("4")
    clock.now += 1
    assert value.current() == 4


def test_a_file_that_is_missing_at_first_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"number_file: '.*/n' cannot be read \(No such file"):
        reloaded(tmp_path / "n", Clock())


def test_a_clock_that_stands_still_does_no_harm(tmp_path: Path) -> None:
    path, clock = tmp_path / "n", Clock()
    path.write_text("1")
    value = reloaded(path, clock)
    clock.now = -5.0
    assert value.current() == 1
