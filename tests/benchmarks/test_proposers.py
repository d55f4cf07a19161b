"""The benchmark of proposers runs small, end to end; every method decodes the ids of plain decoding."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.proposers.__main__ import parse
from benchmarks.shared.envelope import MODELS


@pytest.mark.long
def test_every_method_decodes_plain_ids_and_a_head_drafts_what_the_target_accepts(
    bench: Callable[..., dict[str, Any]],
) -> None:
    result = bench(
        *("proposers", "--prompts", "2", "--streams", "1,2", "--tokens", "24", "--repeats", "1"),
        *("--warm-up", "1"),
        *("--budget", "fixed", "--proposers", "bigram"),
    )

    assert result["identical"]
    assert not result["muted"]
    for by_streams in result["figures"].values():
        for methods in by_streams.values():
            assert {"plain", "lookup", "bigram", "eagle", "medusa", "small-model", "all"} == set(methods)
            assert methods["plain"]["acceptance_length"] == 1
            assert methods["plain"]["draft_ms"] < methods["eagle"]["draft_ms"]
            for head in ("eagle", "medusa"):
                assert methods[head]["acceptance_length"] > 1
                assert methods[head]["nodes_per_accepted"] >= 1
                assert set(methods[head]["accepted_share"]) == {head}
                assert 0 < methods[head]["accepted_by_place"][0] < 1
                assert methods[head]["levels"][0]["per_round"] > 0.4, "one call serves two streams"
    for forced in result["teacher_forced"].values():
        assert forced["contexts"] > 0
        assert max(forced["greedy"]) <= 1


def test_two_heads_of_one_name_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = str(MODELS / "heads" / "medusa")
    monkeypatch.setattr("sys.argv", ["proposers", "--heads", f"{head},{head}"])
    with pytest.raises(SystemExit):
        parse()
    assert "--heads: two heads are called 'medusa'; rename the second: NAME=" in capsys.readouterr().err
