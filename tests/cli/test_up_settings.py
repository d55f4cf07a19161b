"""Settings of `up` from flags, variables and a file that the services read too."""

from pathlib import Path
from typing import Any

import pytest

from outrider.cli.failures import CommandFailed
from outrider.cli.local.stack import Stack
from outrider.cli.local.up_settings import StackOptions, read_up


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


def test_without_flags_and_a_file_up_has_its_defaults() -> None:
    assert read_up({"target": None, "corpus": None, "threads": None}, {}) == StackOptions()


def test_flags_win_over_variables_and_variables_over_the_table_of_up(tmp_path: Path) -> None:
    text = (
        '[up]\ntarget = "a/filed"\ndevice = "filed"\nthreads = 3\nretrieval = "none"\ncorpus = ["x", "y"]\n'
    )
    found = up(tmp_path, text, {"OUTRIDER_UP__DEVICE": "cuda", "OUTRIDER_UP__THREADS": "4"}, threads=5)
    assert (found.target, found.device, found.threads) == ("a/filed", "cuda", 5)
    assert (found.retrieval, found.corpora) == (False, ("x", "y"))


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


def test_a_flag_of_up_holds_for_every_service(tmp_path: Path) -> None:
    options = up(tmp_path, '[verifier]\ndtype = "bfloat16"\nmodel = "a/b"\n', dtype="float32", target="c/d")
    verifier = flags_of(options, "verifier")
    assert (verifier["--dtype"], verifier["--model"]) == ("float32", "c/d")


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
