"""Credentials of `outrider generate`, which no argument ever holds."""

from pathlib import Path

import pytest

from outrider.cli.access import API_KEY, Access
from outrider.cli.failures import CommandFailed
from outrider.wire.keys import bearer
from speculative.errors import InvalidRequest


@pytest.fixture(autouse=True)
def _no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)


def shown(access: Access) -> tuple[tuple[str, str], ...]:
    with access.client("127.0.0.1:1") as client:
        return client._metadata


def test_without_a_key_none_is_shown() -> None:
    assert shown(Access()) == ()


def test_a_key_is_read_from_the_environment_and_rather_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "or-env")
    assert shown(Access()) == bearer("or-env")
    (tmp_path / "key").write_text("or-file\n")
    assert shown(Access(api_key_file=str(tmp_path / "key"))) == bearer("or-file")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"--api-key-file '.*none' cannot be read"):
        Access(api_key_file=str(tmp_path / "none")).client("127.0.0.1:1")
    with pytest.raises(InvalidRequest, match=r"ca: '.*none' cannot be read"):
        Access(ca=str(tmp_path / "none")).client("127.0.0.1:1")
