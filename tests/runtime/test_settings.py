"""Settings come from flags and environment, and nothing unknown passes."""

import json
import re
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field, TypeAdapter

from outrider.runtime.settings import (
    Group,
    Names,
    Peers,
    Reached,
    ServiceSettings,
    as_variables,
    cache_folder,
    default_cache_dir,
    read_settings,
    settings_or_exit,
)
from retrieval_service.settings import RetrievalSettings
from verifier_service.settings import VerifierSettings


class Limits(Group):
    most: int = 3


class ToySettings(ServiceSettings):
    """Settings of a toy service."""

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
    ("name", "meant"),
    [
        ("OUTRIDER_DRAFTER__MODLE", "OUTRIDER_DRAFTER__MODEL?"),
        ("OUTRIDER_DRAFTER__LIMITS__MOTS", "OUTRIDER_DRAFTER__LIMITS__MOST?"),
        ("OUTRIDER_DRAFTR__MODEL", "OUTRIDER_DRAFTER__MODEL?"),
        ("OUTRIDER_DRAFTER_MODEL", "OUTRIDER_DRAFTER__MODEL, with two underscores?"),
        ("outrider_drafter__models", "OUTRIDER_DRAFTER__MODEL?"),
    ],
)
def test_an_unknown_variable_is_refused_and_the_nearest_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=re.escape(f"{name} is no setting; did you mean {meant}")):
        read_settings(ToySettings, ["--model", "m"])


def test_variables_of_other_roles_and_of_the_project_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFIER__MODEL", "other")
    monkeypatch.setenv("OUTRIDER_HOME", "elsewhere")
    monkeypatch.setenv("OUTRIDER_DRAFTER_PORT", "tcp://10.0.0.1:80")  # as Kubernetes names services
    assert read_settings(ToySettings, ["--model", "m"]).model == "m"


def test_a_fault_names_the_setting_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"bind = 'nowhere'.*log_level = 'loud'"):
        read_settings(ToySettings, ["--model", "m", "--bind", "nowhere", "--log-level", "loud"])


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:65536", "x::", "127.0.0.1", ":1"])
def test_an_address_has_a_host_and_a_port_that_exists(address: str) -> None:
    with pytest.raises(ValueError, match="give host:port, the port from 0 to 65535"):
        read_settings(ToySettings, ["--model", "m", "--bind", address])


def test_a_missing_setting_is_named_as_flag_and_variable() -> None:
    with pytest.raises(ValueError, match="model is missing: give --model, OUTRIDER_DRAFTER__MODEL or"):
        read_settings(ToySettings, [])


def test_an_invalid_default_is_reported_without_a_value() -> None:
    class Choosy(ToySettings):
        rooms: Annotated[int, Field(validate_default=True, ge=1)] = 0

    with pytest.raises(ValueError, match=r"^rooms: Input should be greater than or equal to 1$"):
        read_settings(Choosy, ["--model", "m"], {})


def test_settings_do_not_change() -> None:
    settings = read_settings(ToySettings, ["--model", "m"])
    with pytest.raises(ValueError, match="frozen"):
        settings.model = "other"  # type: ignore[misc]


def test_a_fault_exits_with_2_and_is_reported_on_both_streams(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        settings_or_exit(ToySettings, [])
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out.startswith('{"error": {"code": "INVALID_ARGUMENT", "message": "model is missing')
    assert err.startswith("drafter: model is missing")


@pytest.mark.parametrize("flags", [["--modle", "m"], ["--modle=m"], ["--mod", "m"], ["--no-model"]])
def test_an_unknown_flag_is_reported_like_any_other_fault(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        settings_or_exit(ToySettings, flags)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    name = flags[0].partition("=")[0]
    assert err == f"drafter: {name} is no flag; did you mean --model?\n"
    assert json.loads(out)["error"]["message"] == f"{name} is no flag; did you mean --model?"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "m", "loose"], "'loose' belongs to no flag"),
        (["--model"], "argument --model: expected one argument"),
        (["--model", "m", "--limits.mots", "3"], "--limits.mots is no flag; did you mean --limits.most?"),
    ],
)
def test_flags_that_cannot_be_read_are_named(flags: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        read_settings(ToySettings, flags)


def test_a_fault_names_where_the_value_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER__LIMITS__MOST", "many")
    with pytest.raises(ValueError, match=r"bind = 'x' \(--bind\): .*most = 'many' \(OUTRIDER_.*MOST\): "):
        read_settings(ToySettings, ["--model", "m", "--bind", "x"])


def test_another_process_of_the_role_reads_the_same_from_variables() -> None:
    first = read_settings(
        ToySettings, ["--model", "m", "--peers", "a:1,b:2", "--no-check", "--limits.most", "5"], {}
    )
    given = as_variables(first, without=frozenset({"bind"}))
    assert "OUTRIDER_DRAFTER__BIND" not in given
    assert read_settings(ToySettings, [], given) == first


def test_a_constructor_takes_its_arguments_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER__LIMITS__MOST", "7")
    assert ToySettings(model="m").limits.most == 3


@pytest.mark.parametrize("peer", ["dns:verifier:50051", "dns:verifier.space.svc:1", "dns:[::1]:80", "a:1"])
def test_a_peer_may_be_a_name_for_several_addresses(peer: str) -> None:
    assert TypeAdapter(Peers).validate_python(peer) == (peer,)


@pytest.mark.parametrize(
    "peer", ["dns:verifier", "dns:verifier:0", "dns::1", "dns:///verifier:1:2", "srv:a:1"]
)
def test_a_name_without_a_port_is_refused(peer: str) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        TypeAdapter(Peers).validate_python(peer)


@pytest.mark.parametrize(
    ("given", "dialled"),
    [
        ("fd00::a:7:50051", "[fd00::a:7]:50051"),  # as Kubernetes writes a pod's address, and a port
        ("[fd00::7]:50051", "[fd00::7]:50051"),
        ("10.0.0.7:50051", "10.0.0.7:50051"),
        ("pod:50051", "pod:50051"),
    ],
)
def test_an_ipv6_address_to_dial_may_come_without_brackets(given: str, dialled: str) -> None:
    assert TypeAdapter(Reached).validate_python(given) == dialled


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_folder() == Path("/some/cache/outrider")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "outrider"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert default_cache_dir() is None


@pytest.mark.parametrize(("given", "folder"), [("none", None), ("/tmp/kept", Path("/tmp/kept"))])
def test_the_setting_moves_the_cache_or_switches_it_off(given: str, folder: Path | None) -> None:
    settings = read_settings(VerifierSettings, ["--model", "x", "--cache-dir", given], {})
    assert settings.cache_dir == folder


def test_a_proposer_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'jacobi' is named twice; name each proposer once"):
        read_settings(VerifierSettings, ["--model", "m", "--proposers", "jacobi,jacobi"])


@pytest.mark.parametrize(("given", "name"), [("a/b,a/b", "a/b"), ("x=a/b,c/d,x=a/b", "x=a/b")])
def test_a_head_that_is_named_twice_is_refused(given: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is named twice; name each head once"):
        read_settings(VerifierSettings, ["--model", "m", "--heads", given])


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        (["--embeddings-model", "x"], "embeddings_model"),
        (["--embeddings-deadline-s", "3"], "embeddings_deadline_s"),
        (["--embeddings-key", "x", "--embeddings", "/model"], "embeddings_key"),
        (
            ["--embeddings-model", "x", "--embeddings-deadline-s", "10"],
            "embeddings_model and embeddings_deadline_s",
        ),
    ],
)
def test_settings_of_an_embeddings_server_need_its_url(flags: list[str], given: str) -> None:
    with pytest.raises(ValueError, match=f"is given without embeddings_url: give .* or leave {given} out$"):
        read_settings(RetrievalSettings, flags, {})
    read_settings(RetrievalSettings, [*flags, "--embeddings-url", "http://h:1/v1"], {})


def test_an_empty_variable_of_an_embeddings_server_is_none() -> None:
    variables = {f"OUTRIDER_RETRIEVAL__EMBEDDINGS_{name}": "" for name in ("URL", "MODEL", "KEY")}
    assert read_settings(RetrievalSettings, [], variables).embeddings_model == ""
