"""`outrider config`: the problems of a file, and the settings that a role would run with."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.config.check import kinds
from outrider.cli.config.table import BEGIN, COMMAND, rewritten
from outrider.runtime.secret_files import holds_secret
from outrider.runtime.setting_names import settings_of
from tests.cli.inside import Ended, Run, ended

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "configuration.md"
SECRET = "hunter2-of-redis"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    import os

    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Ended:
        return ended(capsys, *arguments)

    return run


def written(folder: Path, text: str) -> str:
    file = folder / "outrider.toml"
    file.write_text(text)
    return str(file)


def test_a_valid_file_is_reported_as_right(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, '[up]\ntarget = "org/name"\n[verifier]\nkv_mb = 64\nmodel = "org/name"\n')
    assert run("config", "check", file) == Ended(0, f"{file}: right\n", "")
    said = json.loads(run("config", "check", file, "--json").out)
    assert said == {"file": file, "ok": True, "problems": [], "left": []}


def test_a_setting_left_to_flags_is_no_fault_of_the_file(run: Run, tmp_path: Path) -> None:
    done = run("config", "check", written(tmp_path, "[verifier]\nkv_mb = 64\n"))
    assert done.status == 0
    assert "left open: verifier.model is missing: give --model, OUTRIDER_VERIFIER__MODEL or" in done.out


def test_every_problem_is_reported_with_path_value_and_what_to_do(run: Run, tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'kv_mb = 3\n[verifer]\nmodel = "x"\n[verifier]\nkv_bm = 3\nthreads = 0\n[drafter]\nmodel = 4\n'
        f'[up]\ndtype = "int3"\n[orchestrator]\nverifier = ["a:1", "b"]\nredis_url_file = "{tmp_path}/none"\n'
        f'[retrieval]\nredis_url = "{SECRET}"\n',
    )
    done = run("config", "check", file, "--json")
    assert done.status == 1
    problems = {one["path"]: one for one in json.loads(done.out)["problems"]}
    assert problems.keys() == {
        "kv_mb",
        "[verifer]",
        "verifier.kv_bm",
        "verifier.threads",
        "drafter.model",
        "up.dtype",
        "orchestrator.verifier",
        "orchestrator.redis_url_file",
        "retrieval.redis_url",
    }
    assert problems["[verifer]"]["what"] == "is no table; did you mean [verifier]?"
    assert problems["verifier.kv_bm"]["what"] == "is no setting; did you mean kv_mb?"
    assert problems["verifier.threads"]["value"] == "0"
    assert problems["verifier.threads"]["what"] == "give auto, or a number from 1 to 1024"
    assert problems["up.dtype"]["value"] == "'int3'"
    assert "bfloat16" in problems["up.dtype"]["what"]
    assert all(one["what"] for one in problems.values())
    plain = run("config", "check", file)
    assert plain.status == 1
    assert plain.out.endswith(f"{file}: 9 problems\n")
    assert SECRET not in done.out + plain.out


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), ("a = \n", "at line 1, column 5")])
def test_a_file_that_is_no_toml_is_refused(run: Run, tmp_path: Path, text: str | None, says: str) -> None:
    file = str(tmp_path / "none.toml") if text is None else written(tmp_path, text)
    done = run("config", "check", file)
    assert (done.status, done.out) == (1, "")
    assert says in done.err


def test_a_role_is_shown_with_where_each_value_comes_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, '[verifier]\nmodel = "filed"\nkv_mb = 64\ndtype = "float16"\n')
    monkeypatch.setenv("OUTRIDER_VERIFIER__DTYPE", "bfloat16")
    monkeypatch.setenv("OUTRIDER_CONFIG", file)
    done = run("config", "show", "verifier", "--kv-mb", "7", "--no-prefix-cache", "--json")
    assert done.status == 0, done.err
    settings = json.loads(done.out)["settings"]
    assert settings["model"] == {"value": "filed", "from": file}
    assert settings["kv_mb"] == {"value": 7, "from": "--kv-mb"}
    assert settings["prefix_cache"] == {"value": False, "from": "--prefix-cache"}
    assert settings["dtype"] == {"value": "bfloat16", "from": "OUTRIDER_VERIFIER__DTYPE"}
    assert settings["max_running"] == {"value": 64, "from": "default"}
    assert settings["threads"] == {"value": "auto", "from": "default"}
    assert settings["cache_dir"]["from"] == "this machine"
    assert set(settings) == {one.dotted for one in settings_of(kinds()["verifier"])}
    assert re.search(r"^kv_mb +7 +--kv-mb$", run("config", "show", "verifier", "--kv-mb", "7").out, re.M)


def test_secrets_are_masked_wherever_they_come_from(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "url").write_text(f"redis://:{SECRET}@h:1")
    flags = ["--verifier", "a:1", "--store", "redis", "--redis-url-file", str(tmp_path / "url")]
    from_file = run("config", "show", "orchestrator", *flags, "--json")
    monkeypatch.setenv("OUTRIDER_ORCHESTRATOR__REDIS_URL", f"redis://:{SECRET}@h:1")
    from_variable = run("config", "show", "orchestrator", "--verifier", "a:1", "--store", "redis", "--json")
    wrong = run("config", "show", "orchestrator", "--verifier", "nowhere")
    urls = [json.loads(one.out)["settings"]["redis_url"] for one in (from_file, from_variable)]
    assert [url["from"] for url in urls] == [
        "the file of --redis-url-file",
        "OUTRIDER_ORCHESTRATOR__REDIS_URL",
    ]
    assert {url["value"] for url in urls} == {"**********"}
    assert (from_file.status, from_variable.status, wrong.status) == (0, 0, 1)
    assert SECRET not in "".join(map(str, (from_file, from_variable, wrong)))


def test_a_role_that_would_not_start_is_shown_with_the_reason(run: Run) -> None:
    done = run("config", "show", "drafter", "--kv-bm", "3")
    assert done.status == 1
    assert "wrong: --kv-bm is no flag; did you mean --kv-mb?" in done.out
    assert re.search(r"^model +\(missing\)", done.out, re.M)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--store", "redis"), "store is redis, but nobody says where"),
        (("--redis-url", "redis://h:1"), "a Redis URL is given, but store is memory"),
    ],
)
def test_incomplete_settings_are_reported_before_a_role_starts(
    run: Run, tmp_path: Path, flags: tuple[str, str], says: str
) -> None:
    shown = run("config", "show", "orchestrator", "--verifier", "h:1", *flags)
    assert (shown.status, says in shown.out) == (1, True)
    name = flags[0].removeprefix("--").replace("-", "_")
    file = written(tmp_path, f'[orchestrator]\nverifier = ["h:1"]\n{name} = "{flags[1]}"\n')
    checked = run("config", "check", file)
    assert checked.status == 0, "a flag or a variable may say the rest"
    assert f"left open: [orchestrator]: {says}" in checked.out


@pytest.mark.parametrize("whole", ['verifier = ["h:1"]\n', ""])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("tls_cert",), "is given without tls_key and tls_ca: give tls_key and tls_ca too"),
        (("tls_key", "tls_ca"), "without tls_cert: give tls_cert too, or leave tls_key and tls_ca out"),
        (("front_cert",), "is given without front_key: give front_key too, or leave front_cert out"),
        (("front_key",), "is given without front_cert: give front_cert too, or leave front_key out"),
        (("front_client_ca",), "given without front_cert and front_key: give front_cert"),
        (("front_cert", "front_client_ca"), "too, or leave front_cert and front_client_ca out"),
    ],
)
def test_a_certificate_without_its_key_is_refused_by_file_and_by_flags(
    run: Run, tmp_path: Path, whole: str, given: tuple[str, ...], says: str
) -> None:
    text = "[orchestrator]\n" + whole + "".join(f'{name} = "x.pem"\n' for name in given)
    checked = run("config", "check", written(tmp_path, text))
    assert checked.status == 1
    assert f"orchestrator.{given[0]} = 'x.pem': " in checked.out
    assert says in checked.out
    flags = [part for name in given for part in ("--" + name.replace("_", "-"), "x.pem")]
    shown = run("config", "show", "orchestrator", "--verifier", "h:1", *flags)
    assert shown.status == 1
    assert f"wrong: {given[0]} = 'x.pem' ({flags[0]}): " in shown.out
    assert says in shown.out


def test_an_empty_path_is_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = '[orchestrator]\nverifier = ["h:1"]\n'
    half = run("config", "check", written(tmp_path, whole + 'front_cert = ""\nfront_key = "k.pem"\n'))
    assert half.status == 1
    assert "front_key = 'k.pem': is given without front_cert" in half.out
    for name in ("FRONT_CERT", "FRONT_KEY", "TLS_CERT", "API_KEYS_FILE", "REDIS_URL_FILE"):
        monkeypatch.setenv(f"OUTRIDER_ORCHESTRATOR__{name}", "")
    shown = run("config", "show", "orchestrator", "--verifier", "h:1")
    assert shown.status == 0, shown.out
    shown = run("config", "show", "orchestrator", "--verifier", "h:1", "--front-cert", "c.pem")
    assert (shown.status, "front_cert = 'c.pem' (--front-cert): is given without" in shown.out) == (1, True)


def test_the_rest_of_a_certificate_may_be_a_flag_where_a_role_starts(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, '[orchestrator]\nverifier = ["h:1"]\nfront_cert = "c.pem"\n')
    flags = ("--config", file, "--front-key", "k.pem")
    assert run("config", "show", "orchestrator", *flags).status == 0
    wrong = run("config", "show", "orchestrator", *flags, "--store", "redis", "--frnt-key", "k.pem")
    assert "front_cert" not in wrong.out.partition("wrong:")[2], "flags were not read: nothing is missing"


def test_a_secret_given_twice_hides_no_other_fault(run: Run, tmp_path: Path) -> None:
    text = f'[orchestrator]\nstore = "radis"\nredis_url = "{SECRET}"\nredis_url_file = "/x"\n'
    checked = run("config", "check", written(tmp_path, text))
    assert "orchestrator.store = 'radis'" in checked.out
    assert "give redis_url or redis_url_file, not both" in checked.out
    assert SECRET not in checked.out


def test_an_unknown_role_is_refused(run: Run) -> None:
    done = run("config", "show", "juggler", "--json")
    assert done.status == 2
    assert (
        "there are: orchestrator, verifier, drafter, retrieval, up"
        in json.loads(done.out)["error"]["message"]
    )


def test_the_document_has_the_tables_that_the_settings_give() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == rewritten(text), f"run {COMMAND}"
    assert text.index(BEGIN) < text.index("| `verifier` |")


def test_every_setting_has_a_description() -> None:
    silent = [
        f"{role}.{one.dotted}"
        for role, kind in kinds().items()
        for one in settings_of(kind)
        if not one.field.description
    ]
    assert silent == []


def test_every_secret_can_be_a_file() -> None:
    for role, kind in kinds().items():
        settings = {one.dotted: one.field for one in settings_of(kind)}
        secrets = [name for name, field in settings.items() if holds_secret(field.annotation)]
        assert {f"{name}_file" for name in secrets} <= settings.keys(), role
        assert not any(name.endswith("_file") for name in secrets)


def test_the_document_s_example_files_are_valid(run: Run, tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.S)
    assert examples
    for text in examples:
        tables: dict[str, Any] = tomllib.loads(text)
        (tmp_path / "url").write_text("redis://h:1")
        for table in tables.values():
            if "redis_url_file" in table:
                text = text.replace(table["redis_url_file"], str(tmp_path / "url"))
        done = run("config", "check", written(tmp_path, text))
        assert done.status == 0, done.out
