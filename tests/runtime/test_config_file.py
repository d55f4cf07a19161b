"""The configuration file: flags and variables win over it, and nothing in it is ignored."""

import re
from pathlib import Path
from typing import ClassVar

import pytest

from outrider.runtime.settings import Group, Names, ServiceSettings, read_settings


class Limits(Group):
    most: int = 3
    least: int = 0


class ToySettings(ServiceSettings):
    role: ClassVar[str] = "drafter"

    model: str
    peers: Names = ()
    check: bool = True
    limits: Limits = Limits()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "outrider.toml"
    file.write_text(
        '[drafter]\nmodel = "filed"\npeers = ["a:1", "b:2"]\ncheck = false\nlog_level = "error"\n'
        "[drafter.limits]\nmost = 5\nleast = 1\n[verifier]\nanything = true\n"
    )
    return file


def test_flags_win_over_variables_and_variables_over_the_file(written: Path) -> None:
    variables = {"OUTRIDER_DRAFTER__LIMITS__MOST": "6", "OUTRIDER_DRAFTER__LOG_LEVEL": "debug"}
    found = read_settings(ToySettings, ["--config", str(written), "--log-level", "warning"], variables)
    assert (found.model, found.peers, found.check) == ("filed", ("a:1", "b:2"), False)
    assert (found.limits.most, found.limits.least, found.log_level) == (6, 1, "warning")


@pytest.mark.parametrize("name", ["OUTRIDER_CONFIG", "OUTRIDER_DRAFTER__CONFIG"])
def test_a_variable_can_name_the_file(written: Path, name: str) -> None:
    assert read_settings(ToySettings, [], {name: str(written)}).model == "filed"


def test_a_flag_names_another_file_than_the_variable_does(written: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[drafter]\nmodel = "other"\n')
    variables = {"OUTRIDER_CONFIG": str(written)}
    assert read_settings(ToySettings, ["--config", str(other)], variables).model == "other"


def test_no_file_is_read_that_was_not_named(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written.parent)
    for name in ("outrider.toml", ".env"):
        (written.parent / name).write_text("nonsense\nOUTRIDER_DRAFTER__MODEL=x\n")
    assert read_settings(ToySettings, ["--model", "m"], {"OUTRIDER_CONFIG": ""}).model == "m"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[drafter]\nmodle = "m"', "modle (FILE): is no setting; did you mean model?"),
        ("[drafter.limits]\nmots = 3", "limits.mots (FILE): is no setting; did you mean most?"),
        ('[draftr]\nmodel = "m"', "[draftr] (FILE): is no table; did you mean [drafter]?"),
        ('model = "m"', "model (FILE): stands outside of every table"),
        ('[drafter]\n"a\\u001b[31m" = 1', r"'a\x1b[31m' (FILE): is no setting"),
        ("drafter = 3", "drafter (FILE): stands outside of every table"),
        ('[drafter]\nconfig = "x"', "config (FILE): is for flags and variables"),
        ("[drafter]\nparent_pid = 1", "parent_pid (FILE): is for flags and variables"),
        ('[drafter]\ngrace_s = "long"', "grace_s = 'long' (FILE): "),
        ("[drafter]\nlimits = 3", "limits = 3 (FILE): "),
        ("[drafter]\nmodel = ", "'FILE' is no TOML: Invalid value (at "),
        ("[drafter]\n[drafter]", "'FILE' is no TOML: Cannot declare"),
    ],
)
def test_a_fault_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(says.replace("FILE", str(file)))):
        read_settings(ToySettings, ["--model", "m", "--config", str(file)][2 * ("model = " in text) :], {})


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('[drafter]\nmodle = "m"\ngrace_s = -1\n[nobody]\n')
    with pytest.raises(ValueError, match="modle") as caught:
        read_settings(ToySettings, ["--config", str(file), "--bind", "x"], {"OUTRIDER_DRAFTER__X": "1"})
    for part in ("[nobody]", "grace_s = -1", "bind = 'x'", "OUTRIDER_DRAFTER__X", "model is missing"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.toml", None, "cannot be read: No such file or directory"),
        (".", None, "cannot be read: Is a directory"),
        ("bytes.toml", b"\xff", "is not UTF-8 at byte 0"),
        ("large.toml", b"#" * 2**21, "has more than"),
        ("deep.toml", b"x = " + b"[" * 5000, "is nested too deeply"),
        ("digits.toml", b"x = " + b"9" * 5000, "cannot be read: .*4300 digits"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_settings(ToySettings, ["--config", str(tmp_path / name)], {})


def test_a_misspelt_name_of_the_variable_is_not_ignored() -> None:
    with pytest.raises(ValueError, match="OUTRIDER_CONFG is not read; did you mean OUTRIDER_CONFIG"):
        read_settings(ToySettings, ["--model", "m"], {"OUTRIDER_CONFG": "x"})
