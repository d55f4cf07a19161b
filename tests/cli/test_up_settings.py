"""Settings of `up` from flags, variables and a file that the services read too."""

import socket
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.failures import CommandFailed
from outrider.cli.local.ports import free_address
from outrider.cli.local.stack import Stack
from outrider.cli.local.up import run_up
from outrider.cli.local.up_settings import EMBEDDED, StackOptions, read_up
from speculative.errors import Unavailable


def up(tmp_path: Path, text: str = "", variables: dict[str, str] | None = None, **flags: Any) -> StackOptions:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    return read_up({"config": file, **flags}, variables or {})


def flags_of(options: StackOptions, role: str) -> dict[str, str]:
    stack = Stack(options)
    try:
        flags = next(one.flags for one in stack._roles if one.name == role)
    finally:
        stack.close()
    return dict(zip(flags[::2], flags[1::2], strict=True))


def notes_of(options: StackOptions) -> list[str]:
    stack = Stack(options)
    stack.close()
    return stack.notes


def test_without_flags_and_a_file_up_has_its_defaults() -> None:
    assert read_up({"target": None, "corpus": None, "threads": None}, {}) == StackOptions()


def test_flags_win_over_variables_and_variables_over_the_table_of_up(tmp_path: Path) -> None:
    text = (
        '[up]\ntarget = "a/filed"\ndevice = "filed"\nthreads = 3\nretrieval = "none"\ncorpus = ["x", "y"]\n'
    )
    found = up(tmp_path, text, {"OUTRIDER_UP__DEVICE": "cuda", "OUTRIDER_UP__THREADS": "4"}, threads=5)
    assert (found.target, found.device, found.threads) == ("a/filed", "cuda", 5)
    assert (found.retrieval, found.corpora) == (False, ("x", "y"))


@pytest.mark.parametrize(
    ("text", "variables", "flags"),
    [
        ("[up]\nserve_drafter = true\n", {}, {}),
        ("", {"OUTRIDER_UP__SERVE_DRAFTER": "true"}, {}),
        ("", {}, {"serve_drafter": True}),
    ],
)
def test_the_drafter_is_served_on_request(
    tmp_path: Path, text: str, variables: dict[str, str], flags: dict[str, Any]
) -> None:
    assert up(tmp_path, text, variables, **flags).serve_drafter
    assert not up(tmp_path).serve_drafter


def test_a_service_s_own_table_wins_over_choices_of_up(tmp_path: Path) -> None:
    text = '[up]\ndtype = "float16"\n[verifier]\ndtype = "bfloat16"\nbind = "127.0.0.1:7001"\nmodel = "a/b"\n'
    options = up(tmp_path, text, {"OUTRIDER_DRAFTER__THREADS": "7", "OUTRIDER_DRAFTER__MODEL": "a/s"})
    verifier, drafter = flags_of(options, "verifier"), flags_of(options, "drafter")
    assert (verifier["--model"], verifier["--bind"]) == ("a/b", "127.0.0.1:7001")
    assert "--dtype" not in verifier, "its own table says it"
    assert (drafter["--model"], drafter["--dtype"]) == ("a/s", "float16")
    assert "--threads" not in drafter
    assert flags_of(options, "orchestrator")["--verifier"] == "127.0.0.1:7001"
    assert options.overrides.environment() == {"OUTRIDER_CONFIG": str((tmp_path / "outrider.toml").resolve())}


def test_each_of_several_drafters_is_a_source_of_its_own(tmp_path: Path) -> None:
    text = '[drafter]\nbind = "127.0.0.1:7003"\n'
    options = up(tmp_path, text, target="org/name", drafter="org/small,org/other")
    first, second = flags_of(options, "drafter"), flags_of(options, "drafter-2")
    assert (first["--model"], first["--name"]) == ("org/small", "drafter")
    assert (second["--model"], second["--name"]) == ("org/other", "drafter-2")
    assert first["--bind"] == "127.0.0.1:7003"
    assert second["--bind"] != "127.0.0.1:7003", "two processes need two ports"
    dialled = flags_of(options, "orchestrator")["--drafter"].split(",")
    assert (dialled[0], len(dialled)) == ("127.0.0.1:7003", 2)


def test_a_name_of_the_drafter_s_own_settings_is_the_first_drafter_s(tmp_path: Path) -> None:
    text = '[drafter]\nname = "small"\n'
    options = up(tmp_path, text, target="org/name", drafter="org/small,org/other")
    assert [flags_of(options, role)["--name"] for role in ("drafter", "drafter-2")] == ["small", "small-2"]
    alone = up(tmp_path, text, target="org/name", drafter="org/small")
    assert "--name" not in flags_of(alone, "drafter"), "its own table says it"


def test_heads_are_given_to_the_verifier_alone(tmp_path: Path) -> None:
    options = up(tmp_path, "", heads=[str(tmp_path), "mine=org/head"], target="org/name", drafter="a/small")
    assert flags_of(options, "verifier")["--heads"] == f"{tmp_path},mine=org/head"
    assert "--heads" not in flags_of(options, "drafter")


def test_an_embedded_head_is_named_by_its_kind(tmp_path: Path) -> None:
    options = up(tmp_path, "", heads=["eagle", "second=medusa", "./eagle"])
    eagle, second, folder = flags_of(options, "verifier")["--heads"].split(",")
    assert (EMBEDDED / "heads" / "eagle").samefile(eagle)
    assert second == f"second={EMBEDDED / 'heads' / 'medusa'}"
    assert folder == "./eagle"


@pytest.mark.parametrize(
    "heads", [["eagle", "eagle"], ["eagle,eagle"], ["eagle", str(EMBEDDED / "heads/eagle")]]
)
def test_a_head_that_is_named_twice_is_refused(tmp_path: Path, heads: list[str]) -> None:
    with pytest.raises(CommandFailed, match=r"^--heads: 'eagle' is named twice; name each head once$"):
        up(tmp_path, heads=heads)


@pytest.mark.parametrize("head", ["", " ", "eagle,,medusa", "eagle,"])
def test_a_head_without_a_name_is_refused(tmp_path: Path, head: str) -> None:
    with pytest.raises(CommandFailed, match=f"^--heads '{head}' has an empty name: give a head"):
        up(tmp_path, heads=["eagle", head])


def test_an_empty_variable_names_no_head(tmp_path: Path) -> None:
    assert up(tmp_path, "", {"OUTRIDER_UP__HEADS": ""}).heads == ()
    assert up(tmp_path, heads=["none"]).heads == ()


def test_a_flag_of_up_holds_for_every_service(tmp_path: Path) -> None:
    options = up(tmp_path, '[verifier]\ndtype = "bfloat16"\nmodel = "a/b"\n', dtype="float32", target="c/d")
    verifier = flags_of(options, "verifier")
    assert (verifier["--dtype"], verifier["--model"]) == ("float32", "c/d")


def test_sources_that_the_orchestrator_s_own_settings_name_draft_as_well_and_up_says_so(
    tmp_path: Path,
) -> None:
    text = '[orchestrator]\nretrieval = ["far:1", "far:2"]\n'
    variables = {
        "OUTRIDER_ORCHESTRATOR__DRAFTER": "gpu:50062",
        "OUTRIDER_ORCHESTRATOR__VERIFIER": "gpu:50061",
    }
    free = {"bind": "127.0.0.1:0", "http_bind": "127.0.0.1:0"}
    options = up(tmp_path, text, variables, target="a/b", drafter="a/s", **free)
    flags = flags_of(options, "orchestrator")
    assert flags["--drafter"].endswith(",gpu:50062")
    assert flags["--retrieval"].endswith(",far:1,far:2")
    assert "gpu" not in flags["--verifier"]
    assert notes_of(options) == [
        "the orchestrator's setting verifier = gpu:50061 is ignored: `up` starts one",
        "the orchestrator's own settings name gpu:50062: drafts come from there as well",
        "the orchestrator's own settings name far:1,far:2: drafts come from there as well",
    ]
    alone = up(tmp_path, "", variables, target="a/b", drafter="none", retrieval="none")
    assert flags_of(alone, "orchestrator")["--drafter"] == "gpu:50062", "also without a drafter of its own"


def test_ports_are_fixed_ones_or_the_next_that_are_free_and_up_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_address(port) != f"127.0.0.1:{port}"
    flags = flags_of(StackOptions(target="a/b"), "orchestrator")
    assert 50051 <= int(flags["--bind"].rpartition(":")[2]) < 50151
    assert 8000 <= int(flags["--http-bind"].rpartition(":")[2]) < 8100
    asked = flags_of(
        up(tmp_path, bind="127.0.0.1:0", http_bind="127.0.0.1:7000", target="a/b"), "orchestrator"
    )
    assert (asked["--bind"], asked["--http-bind"]) == ("127.0.0.1:0", "127.0.0.1:7000")


@pytest.mark.parametrize("setting", ["bind", "http_bind"])
def test_a_taken_port_is_told_before_any_model_is_looked_for(tmp_path: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        by_flag = up(tmp_path, target="a/b", **{setting: address})
        by_file = up(tmp_path, f'[up]\ntarget = "a/b"\n[orchestrator]\n{setting} = "{address}"\n')
        for options in (by_flag, by_file):
            with pytest.raises(Unavailable, match=f"on {address}: another process uses port"):
                run_up(options, as_json=True)


def test_a_port_that_another_process_has_is_named_with_the_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.cli.local.stack.free_address", lambda first: f"127.0.0.1:{first + 1}")
    assert notes_of(StackOptions(target="a/b")) == [
        "port 50051 is in use: gRPC is served on 127.0.0.1:50052",
        "port 8000 is in use: HTTP is served on 127.0.0.1:8001",
    ]


@pytest.mark.parametrize(
    ("text", "variables", "flags", "says"),
    [
        ('[up]\ntraget = "x"\n', {}, {}, "traget .*: is no setting; did you mean target"),
        ("", {"OUTRIDER_UP__TRAGET": "x"}, {}, "did you mean OUTRIDER_UP__TARGET"),
        ("", {}, {"bind": "nowhere"}, r"bind = 'nowhere' \(--bind\): give host:port"),
        ("", {}, {"retrieval": "some"}, "retrieval = 'some'"),
        ('[up]\ntarget = "a/b"\n[verifier]\nmodel = "c/d"\n', {}, {}, "'a/b', but the model of the verifier"),
        ("[up\n", {}, {}, "is no TOML"),
    ],
)
def test_invalid_or_contradicting_settings_are_refused(
    tmp_path: Path, text: str, variables: dict[str, str], flags: dict[str, str], says: str
) -> None:
    with pytest.raises(CommandFailed, match=says) as refused:
        up(tmp_path, text, variables, **flags)
    assert refused.value.status == 2


def test_what_the_retrieval_worker_alone_uses_is_refused_where_none_starts() -> None:
    for flags in ({"corpus": ["docs"]}, {"folder": "kept"}):
        name, *_ = flags
        with pytest.raises(CommandFailed, match=f"--{name} needs the retrieval worker, which"):
            read_up({"retrieval": "none", **flags}, {})
    assert not read_up({"retrieval": "none"}, {"OUTRIDER_UP__FOLDER": "kept"}).retrieval, "a flag wins"
