"""The command line without any service: help, usage and errors."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.failures import CommandFailed
from outrider.cli.local import up_settings
from outrider.cli.modules import find_benchmark
from tests.cli.inside import Ended, Run, ended

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("generate", "--address", "127.0.0.1:1", "--ids", "1")
PLAIN = (*ASKED, "--speculation", "off")


def outrider(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "outrider.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        timeout=200,
        check=False,
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command inside this process; one that becomes another program needs `outrider`."""

    def run(*arguments: str) -> Ended:
        return ended(capsys, *arguments)

    return run


def error_of(out: str) -> dict[str, str]:
    assert out.count("\n") == 1, out
    error: dict[str, str] = json.loads(out)["error"]
    assert set(error) == {"code", "message"}
    return error


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from outrider.cli.app import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'grpc', 'torch', 'transformers', 'pydantic', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for command in ("up", "chat", "generate", "serve", "bench", "demo", "version"):
        assert f"  {command} " in done.stdout


def test_a_kind_of_head_that_does_not_exist_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from outrider.cli.app import main\n"
        "try:\n    main(['distil', 'notes', '--kind', 'nope', '--target', 't', '--out', 'o'])\n"
        "except SystemExit as end:\n    assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--kind 'nope' is not one of" in done.stderr


@pytest.mark.parametrize("command", ["up", "chat", "generate", "bench"])
def test_help_of_a_command_has_examples(command: str, run: Run) -> None:
    done = run(command, "--help")
    assert done.status == 0
    assert f"outrider {command}" in done.out.partition("Example")[2]


def test_help_of_a_service_lists_its_settings() -> None:
    done = outrider("serve", "orchestrator", "--help")
    assert done.returncode == 0
    assert "--max-streams" in done.stdout
    assert "outrider serve orchestrator" in done.stdout


def test_help_of_a_benchmark_is_its_own() -> None:
    done = outrider("bench", "offline", "--help")
    assert done.returncode == 0
    assert "outrider bench offline" in done.stdout
    assert "--prompts" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nonsense",), "nonsense"),
        (("generate", "--bogus"), "--bogus"),
        (("up", "--bogus"), "--bogus"),
        (("generate", "--prompt", "x"), "--address"),
        (("generate", "--address", "127.0.0.1:1"), "either --prompt or --ids"),
        (("generate", "--address", "127.0.0.1:1", "--prompt", "x", "--ids", "1"), "either --prompt or --ids"),
        (("generate", "--address", "127.0.0.1:1", "--ids", "1,two"), "1,two"),
        (("generate", "--address", "127.0.0.1:1", "--ids", "1", "--top-k", "many"), "--top-k"),
        (("generate", "--address", "127.0.0.1:1", "--ids", "1", "--speculation", "perhaps"), "perhaps"),
        (("generate", "--address", "127.0.0.1:1", "--ids", "1", "--stop-ids", "1,two"), "--stop-ids '1,two'"),
        (("generate", "--address", "127.0.0.1:1", "--ids", "1", "--logprobs-of", "cooked"), "cooked"),
        ((*PLAIN, "--sources", "lookup"), "--speculation off and --sources contradict each other: leave"),
        ((*PLAIN, "--corpora", "code"), "--speculation off and --corpora contradict each other"),
        ((*ASKED, "--sources", ","), "--sources ',' has an empty name; give names such as a,b, or leave"),
        ((*ASKED, "--sources", ""), "--sources '' has an empty name"),
        ((*ASKED, "--sources", "lookup,,drafter"), "--sources 'lookup,,drafter' has an empty name"),
        ((*ASKED, "--corpora", " , a"), "--corpora ' , a' has an empty name"),
        ((*PLAIN, "--nodes", "8"), "--speculation off and --nodes contradict each other"),
        ((*ASKED, "--nodes", "0", "--sources", "lookup"), "--nodes 0 and --sources contradict each other"),
        ((*ASKED, "--references", "/dev/null"), "--references '/dev/null' is empty"),
        ((*ASKED, "--references", "/no/such.py"), "--references '/no/such.py' cannot be read as text"),
        ((*ASKED, *(17 * ("--references", __file__))), "--references is given 17 times; at most 16 files"),
        ((*PLAIN, "--criterion", "bild"), "--speculation off and --criterion contradict each other"),
        ((*ASKED, "--criterion", "typical:"), "--criterion 'typical:' is not NAME or NAME:PARAMETER=NUMBER"),
        ((*ASKED, "--criterion", "typical:epsilon"), "--criterion 'typical:epsilon' is not NAME or NAME:"),
        ((*ASKED, "--criterion", "typical:epsilon=much"), "--criterion 'typical:epsilon=much' is not"),
        ((*ASKED, "--criterion", "typical:epsilon=0.2, epsilon=0.3"), "gives a parameter twice"),
        (
            ("distil", "notes", "--kind", "lm", "--target", "t", "--out", "o", "--boost", "0.5"),
            "--boost 0.5 without --boost-of",
        ),
        (
            ("distil", "notes", "--kind", "nope", "--target", "t", "--out", "o"),
            "--kind 'nope' is not one of medusa, blockwise, hydra, eagle",
        ),
        (
            ("edge", "--server", "http://c", "--draft-with", "x", "--bind", "nowhere"),
            "'nowhere' is not host:",
        ),
        (("bench", "no_such"), "offline"),
        (("bench", "../setup"), "offline"),
        (("serve", "juggler"), "juggler"),
    ],
)
def test_wrong_usage_exits_with_two_and_says_what_is_wrong(
    arguments: tuple[str, ...], says: str, run: Run
) -> None:
    plain = run(*arguments)
    assert (plain.status, plain.out) == (2, "")
    assert says in plain.err
    as_json = run(*arguments, "--json")
    assert as_json.status == 2
    assert error_of(as_json.out)["code"] == "INVALID_ARGUMENT"
    assert says in error_of(as_json.out)["message"]


def test_a_setting_that_does_not_exist_is_refused_by_the_service() -> None:
    done = outrider("serve", "orchestrator", "--verifier", "a:1", OUTRIDER_ORCHESTRATOR__MAX_STREAM="3")
    assert done.returncode == 2
    assert "MAX_STREAM" in error_of(done.stdout)["message"]
    assert "MAX_STREAMS" in done.stderr


def test_an_address_without_an_orchestrator_is_a_failure(run: Run) -> None:
    plain = run("generate", "--address", "127.0.0.1:1", "--prompt", "x")
    assert (plain.status, plain.out) == (1, "")
    assert "127.0.0.1:1" in plain.err
    as_json = run("generate", "--address", "127.0.0.1:1", "--prompt", "x", "--json")
    assert as_json.status == 1
    assert error_of(as_json.out)["code"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ids", "-1"), "-1"),
        (("--ids", "4294967296"), "4294967296"),
        (("--ids", "1", "--seed", "-1"), "seed"),
        (("--ids", "1", "--seed", str(2**64)), "seed"),
        (("--ids", "1", "--max-tokens", str(2**63)), "max_tokens"),
    ],
)
def test_a_value_beyond_its_field_s_range_is_refused_by_name(
    flags: tuple[str, ...], says: str, run: Run
) -> None:
    done = run("generate", "--address", "127.0.0.1:1", *flags, "--json")
    assert done.status == 1
    assert error_of(done.out)["code"] == "INVALID_ARGUMENT"
    assert says in error_of(done.out)["message"]


def test_a_taken_port_of_edge_is_told_before_any_model_is_loaded(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("edge", "--server", "http://127.0.0.1:1", "--draft-with", "/no/model", "--bind", bind)
    assert done.status == 2
    assert f"--bind {bind}: Address already in use; give another port" in done.err


def test_a_file_without_certificates_is_named_by_edge(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.touch()
    for ca in (empty, tmp_path / "nowhere.pem"):
        done = run("edge", "--server", "https://c", "--draft-with", "x", "--bind", "127.0.0.1:0", "--ca", ca)
        assert done.status == 1
        assert f"ca '{ca}' holds no certificates that can be read" in done.err


def test_an_empty_address_is_no_address(run: Run) -> None:
    done = run("generate", "--address", "", "--prompt", "x", "--json")
    assert done.status == 1
    assert "address is empty" in error_of(done.out)["message"]


def test_version_is_data(run: Run) -> None:
    assert run("version").out.startswith("outrider ")
    assert json.loads(run("version", "--json").out)["version"]


def test_a_missing_model_fails_by_name(tmp_path: Path, run: Run) -> None:
    done = run("up", "--target", str(tmp_path / "nowhere"), "--json")
    assert done.status == 1
    assert "nowhere" in error_of(done.out)["message"]


def test_an_installed_wheel_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_settings, "EMBEDDED", tmp_path)
    with pytest.raises(CommandFailed, match="outrider up PATH"):
        up_settings.StackOptions().models()
    with pytest.raises(CommandFailed, match="clone"):
        find_benchmark("offline", tmp_path)
