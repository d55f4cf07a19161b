"""Every secret may be given in a file, and none is ever shown."""

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr

from outrider.runtime.settings import Group, ServiceSettings, as_variables, read_settings

SECRET = "hunter2-of-the-toy"


class Door(Group):
    password: SecretStr | None = None


class ToySettings(ServiceSettings):
    role: ClassVar[str] = "drafter"

    token: SecretStr
    """Who asks."""
    door: Door = Door()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def read(*flags: str, **variables: str) -> ToySettings:
    named = {f"OUTRIDER_DRAFTER__{name.upper()}": value for name, value in variables.items()}
    return read_settings(ToySettings, list(flags), named)


def test_every_secret_has_a_field_for_a_file_beside_it() -> None:
    names = list(ToySettings.model_fields)
    assert names[names.index("token") + 1] == "token_file"
    assert list(Door.model_fields) == ["password", "password_file"]
    assert "token" in (ToySettings.model_fields["token_file"].description or "")


def test_a_secret_comes_from_a_file_as_flag_or_variable(file: Path) -> None:
    for found in (read("--token-file", str(file)), read(token_file=str(file))):
        assert found.token.get_secret_value() == SECRET


def test_a_secret_of_a_group_comes_from_a_file_too(file: Path) -> None:
    found = read("--token", "t", "--door.password-file", str(file))
    assert found.door.password is not None
    assert found.door.password.get_secret_value() == SECRET


def test_the_source_that_wins_decides_between_a_secret_and_its_file(file: Path, tmp_path: Path) -> None:
    config = tmp_path / "outrider.toml"
    config.write_text(f'[drafter]\ntoken_file = "{file}"\n')
    assert read("--config", str(config)).token.get_secret_value() == SECRET
    assert read("--config", str(config), token="given").token.get_secret_value() == "given"
    assert read("--token-file", str(file), token="given").token.get_secret_value() == SECRET


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read: FileNotFoundError"), (b"", "is empty"), (b"\xff", "UnicodeDecodeError")],
)
def test_an_unusable_file_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"token_file = .*{says}"):
        read("--token-file", str(path))


def test_a_secret_and_its_file_in_one_place_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="give token or token_file, not both"):
        read("--token-file", str(file), "--token", SECRET)


def test_no_secret_is_shown(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = read("--token-file", str(file), "--door.password", SECRET)
    caplog.set_level(logging.DEBUG)
    logging.getLogger("toy").info("%r %s", found, found.model_dump())
    for shown in (repr(found), str(found.model_dump()), found.model_dump_json(), caplog.text):
        assert SECRET not in shown


@pytest.mark.parametrize(
    ("flags", "also"),
    [
        (["--token-file", "FILE", "--token", SECRET], {}),
        (["--token", "t", "--tokne", SECRET], {}),
        (["--token", "t", f"--tokne={SECRET}"], {}),
        (["--token", "t"], {"OUTRIDER_DRAFTER__TOKNE": SECRET}),
        (["--token", "t"], {"OUTRIDER_DRAFTER__DOOR": f'{{"pasword": "{SECRET}"}}'}),
        (["--token", "t"], {"OUTRIDER_DRAFTER__DOOR": f'{{"password": ["{SECRET}"]}}'}),
        (["--token", "t"], {"OUTRIDER_DRAFTER__DOOR": SECRET}),
    ],
)
def test_no_fault_quotes_a_secret(flags: list[str], also: dict[str, str], file: Path) -> None:
    with pytest.raises(ValueError, match=r"tok|door|TOK|DOOR") as caught:
        read_settings(ToySettings, [str(file) if flag == "FILE" else flag for flag in flags], also)
    assert SECRET not in str(caught.value)


def test_a_constructor_s_fault_quotes_no_secret() -> None:
    wrong: Any = {"token": SECRET, "token_file": "/nowhere", "doors": SECRET}
    with pytest.raises(ValueError, match="not both") as caught:
        ToySettings(**wrong)
    assert SECRET not in str(caught.value)


def test_another_process_gets_only_the_path_of_a_secret_file(file: Path) -> None:
    given = as_variables(read("--token-file", str(file)))
    assert SECRET not in str(given)
    assert read_settings(ToySettings, [], given).token.get_secret_value() == SECRET
    given = as_variables(read("--token", SECRET))
    assert read_settings(ToySettings, [], given).token.get_secret_value() == SECRET
