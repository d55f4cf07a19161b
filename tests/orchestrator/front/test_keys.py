"""The file of keys: strict, by line, and silent about what stands in a line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.front.auth import SETTING, KeyTable, read_keys, watched_keys
from orchestrator.front.quota import Quota
from outrider.wire.keys import key_digest, new_key
from speculative.errors import InvalidRequest

KEY = new_key()


def read(*lines: object) -> KeyTable:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read_keys({SETTING: text.encode()})


def line(key: str = KEY, **fields: object) -> dict[str, object]:
    return {"sha256": key_digest(key), "tenant": "acme", **fields}


def test_a_key_is_found_by_what_the_client_shows() -> None:
    table = read("# ours", "", line(streams=2, requests_per_minute=3, tokens_per_minute=4), line(new_key()))
    found = table.find(KEY)
    assert found is not None
    assert (found.tenant, found.quota) == ("acme", Quota(2, 3, 4))
    assert len(table) == 2


@pytest.mark.parametrize(
    "shown",
    ["", KEY[:-1], KEY + "x", KEY.swapcase(), key_digest(KEY), "é"],
    ids=["nothing", "shorter", "longer", "swapped", "digest", "rubbish"],
)
def test_nothing_else_is_found(shown: str) -> None:
    assert read(line()).find(shown) is None


def test_keys_without_quotas_have_none() -> None:
    found = read(line()).find(KEY)
    assert found is not None
    assert found.quota == Quota()


WRONG: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "line 1: is no JSON object"),
    "no object": ("5", "line 1"),
    "a key in place of a line": (KEY, "line 1: is no JSON object"),
    "a key in place of a digest": ({"sha256": KEY, "tenant": "acme"}, "line 1: sha256"),
    "a digest in capitals": ({"sha256": key_digest(KEY).upper(), "tenant": "acme"}, "sha256"),
    "no tenant": ({"sha256": key_digest(KEY)}, "tenant: Field required"),
    "an empty tenant": (line(tenant=""), "tenant"),
    "a tenant with a line break": (line(tenant="a\nb"), "cannot be printed"),
    "a quota of nothing": (line(streams=0), "streams"),
    "a quota that is no number": (line(tokens_per_minute="5"), "tokens_per_minute"),
    "a quota that is true": (line(streams=True), "streams"),
    "an unknown field": (line() | {KEY: 1}, "a field that is not known"),
    "a name twice": ('{"sha256": "a", "tenant": "a", "tenant": "b"}', "no JSON object"),
    "brackets without end": ("[" * 100_000, "line 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_line_that_is_wrong_is_refused_by_number_and_never_repeated(what: str) -> None:
    wrong, reason = WRONG[what]
    with pytest.raises(InvalidRequest, match=reason) as refused:
        read(wrong)
    assert SETTING in str(refused.value)
    assert KEY not in str(refused.value)
    assert refused.value.__cause__ is None, "a trace would repeat it"


def test_a_key_may_stand_there_once() -> None:
    with pytest.raises(InvalidRequest, match="line 3: has the same sha256"):
        read(line(), "# the same", line(tenant="other"))


@pytest.mark.parametrize("contents", [b"", b"\n# none yet\n", b"\xff"])
def test_a_file_without_keys_is_refused(contents: bytes) -> None:
    with pytest.raises(InvalidRequest, match=SETTING):
        read_keys({SETTING: contents})


def test_a_file_that_changes_is_read_again_and_rubbish_keeps_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = tmp_path / "keys", new_key()
    path.write_text(json.dumps(line()))
    keys = watched_keys(path, every_s=0.0)
    path.write_text(json.dumps(line(other)))
    assert keys.current().find(KEY) is None
    assert keys.current().find(other) is not None
    path.write_text(f"{other}\n")
    assert keys.current().find(other) is not None
    assert "line 1" in caplog.text
    assert other not in caplog.text


def test_no_repr_has_a_digest() -> None:
    table = read(line())
    assert key_digest(KEY) not in f"{table!r} {table.find(KEY)!r} {vars(table)!r}"


def test_what_the_command_prints_is_a_key_and_its_line() -> None:
    from outrider.cli.app import app

    flags = ["keys", "new", "--tenant", "acme", "--streams", "2", "--json"]
    said = json.loads(CliRunner().invoke(app, flags).stdout)
    found = read(said["line"]).find(said["key"])
    assert found is not None
    assert (found.tenant, found.quota) == ("acme", Quota(streams=2))
    shown = CliRunner().invoke(app, flags[:-1]).stdout.splitlines()
    again = read(shown[3]).find(shown[1])
    assert again is not None
    assert shown[1] != said["key"]


def test_a_tenant_is_needed_for_a_key() -> None:
    from outrider.cli.app import app

    assert CliRunner().invoke(app, ["keys", "new"]).exit_code != 0
    assert CliRunner().invoke(app, ["keys", "new", "--tenant", ""]).exit_code != 0
