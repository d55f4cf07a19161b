"""Settings come from flags and environment, and nothing unknown passes."""

from typing import ClassVar

import pytest
from pydantic import TypeAdapter

from outrider.runtime.settings import Group, Names, Peers, ServiceSettings, read_settings, settings_or_exit


class Limits(Group):
    most: int = 3


class ToySettings(ServiceSettings):
    """Settings of a toy."""

    role: ClassVar[str] = "drafter"

    model: str
    """Where the model lies."""
    peers: Names = ()
    """Whom to call."""
    check: bool = True
    limits: Limits = Limits()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


def test_a_setting_is_a_flag() -> None:
    settings = read_settings(ToySettings, ["--model", "here", "--log-level", "debug", "--no-check"])
    assert (settings.model, settings.log_level, settings.check) == ("here", "debug", False)


def test_a_setting_is_a_variable_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER__MODEL", "here")
    monkeypatch.setenv("OUTRIDER_DRAFTER__LIMITS__MOST", "5")
    settings = read_settings(ToySettings, [])
    assert (settings.model, settings.limits.most) == ("here", 5)


def test_a_flag_goes_before_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER__MODEL", "there")
    assert read_settings(ToySettings, ["--model", "here"]).model == "here"


@pytest.mark.parametrize("flags", [["--peers", "a:1,b:2"], ["--peers", "a:1", "--peers", "b:2"]])
def test_names_are_separated_by_commas_or_repeated(flags: list[str]) -> None:
    assert read_settings(ToySettings, ["--model", "m", *flags]).peers == ("a:1", "b:2")


def test_names_in_a_variable_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER__PEERS", "a:1, b:2")
    assert read_settings(ToySettings, ["--model", "m"]).peers == ("a:1", "b:2")


@pytest.mark.parametrize(
    "name",
    [
        "OUTRIDER_DRAFTER__MODLE",
        "OUTRIDER_DRAFTER__LIMITS__MOTS",
        "OUTRIDER_DRAFTR__MODEL",
        "outrider_drafter__x",
    ],
)
def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"no such setting: {name}"):
        read_settings(ToySettings, ["--model", "m"])


def test_variables_of_other_roles_and_of_the_project_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER__MODEL", "other")
    monkeypatch.setenv("OUTRIDER_HOME", "elsewhere")
    assert read_settings(ToySettings, ["--model", "m"]).model == "m"


def test_a_fault_names_the_setting_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"bind = 'nowhere'.*log_level = 'loud'"):
        read_settings(ToySettings, ["--model", "m", "--bind", "nowhere", "--log-level", "loud"])


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:65536", "x::", "127.0.0.1", ":1"])
def test_an_address_has_a_host_and_a_port_that_exists(address: str) -> None:
    with pytest.raises(ValueError, match="give host:port, the port from 0 to 65535"):
        read_settings(ToySettings, ["--model", "m", "--bind", address])


def test_what_is_missing_is_named_as_flag_and_variable() -> None:
    with pytest.raises(ValueError, match="model is missing: give --model or OUTRIDER_DRAFTER__MODEL"):
        read_settings(ToySettings, [])


def test_settings_do_not_change() -> None:
    settings = read_settings(ToySettings, ["--model", "m"])
    with pytest.raises(ValueError, match="frozen"):
        settings.model = "other"  # type: ignore[misc]


def test_a_fault_exits_with_2_and_is_told_on_both_streams(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        settings_or_exit(ToySettings, [])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out.startswith('{"error": {"code": "INVALID_ARGUMENT", "message": "model is missing')
    assert err.startswith("drafter: model is missing")


def test_an_unknown_flag_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        settings_or_exit(ToySettings, ["--modle", "m"])
    assert exit_.value.code == 2
    assert "--modle" in capsys.readouterr().err


@pytest.mark.parametrize("peer", ["dns:verifier:50051", "dns:verifier.space.svc:1", "dns:[::1]:80", "a:1"])
def test_a_peer_may_be_a_name_for_several_addresses(peer: str) -> None:
    assert TypeAdapter(Peers).validate_python(peer) == (peer,)


@pytest.mark.parametrize(
    "peer", ["dns:verifier", "dns:verifier:0", "dns::1", "dns:///verifier:1:2", "srv:a:1"]
)
def test_a_name_without_a_port_is_refused(peer: str) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        TypeAdapter(Peers).validate_python(peer)
