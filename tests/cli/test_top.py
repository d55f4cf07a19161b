"""Figures of `outrider top` from two readings of a process's metrics."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.app import main
from outrider.cli.failures import CommandFailed
from outrider.cli.observe.gauges import ReadingPair, figures, read
from outrider.cli.observe.top import Watched, metrics_of, table, url_of
from outrider.runtime.metrics import MODEL, Metrics, MetricsServer

VERIFIER = """
outrider_info{{role="verifier",version="0"}} 1
outrider_num_requests_running{{model_name="m"}} 3
outrider_num_requests_waiting{{model_name="m"}} 1
outrider_kv_cache_usage_perc{{model_name="m"}} 0.25
outrider_verifier_committed_total {committed}
outrider_verifier_rounds_total {rounds}
outrider_verifier_steps_total {rounds}
outrider_verifier_step_seconds_sum{{phase="forward"}} {seconds}
outrider_verifier_step_seconds_count{{phase="forward"}} {rounds}
outrider_verifier_step_seconds_sum{{phase="waiting"}} 99
outrider_verifier_step_seconds_count{{phase="waiting"}} 99
outrider_spec_decode_num_draft_tokens_total{{model_name="m",source="drafter"}} {drafted}
outrider_spec_decode_num_accepted_tokens_total{{model_name="m",source="drafter"}} {accepted}
outrider_spec_decode_num_draft_tokens_total{{model_name="m",source="lookup"}} 7
outrider_spec_decode_num_accepted_tokens_total{{model_name="m",source="lookup"}} 2
outrider_verifier_sources_attached 2
outrider_verifier_failed_sessions_total 0
"""


def verifier(at_s: float, **values: float) -> Any:
    numbers = {"committed": 0, "rounds": 0, "seconds": 0, "drafted": 0, "accepted": 0} | values
    return read(VERIFIER.format(**numbers), at_s)


def test_a_verifier_s_rates_are_of_the_time_between_two_readings() -> None:
    before = verifier(10.0, committed=100, rounds=50, seconds=1.0, drafted=10, accepted=5)
    after = verifier(12.0, committed=220, rounds=90, seconds=1.2, drafted=50, accepted=25)
    said = figures(ReadingPair(before, after))
    assert said == {
        "role": "verifier",
        "requests": 3,
        "waiting": 1,
        "tokens_per_second": 60,
        "acceptance_length": 3,
        "sources": {"drafter": {"verified": 40, "accepted": 20, "share": 0.5}},
        "kv": 0.25,
        "step_s": 0.005,
        "steps_per_second": 20,
        "sources_attached": 2,
        "failed_sessions": 0,
    }


def test_a_process_that_does_nothing_has_no_means() -> None:
    still = verifier(10.0, committed=100, rounds=50)
    said = figures(ReadingPair(still, verifier(11.0, committed=100, rounds=50)))
    assert (said["tokens_per_second"], said["acceptance_length"], said["step_s"]) == (0, None, None)
    assert said["sources"] == {}


def test_counters_that_began_anew_are_no_negative_rates() -> None:
    said = figures(
        ReadingPair(verifier(10.0, committed=900, rounds=300), verifier(11.0, committed=30, rounds=10))
    )
    assert (said["tokens_per_second"], said["acceptance_length"]) == (30, 3)


def test_metrics_of_another_program_are_refused_by_what_they_lack() -> None:
    strange = read("up 1\n", 0.0)
    with pytest.raises(ValueError, match="no outrider_info"):
        figures(ReadingPair(strange, strange))


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9464", "http://127.0.0.1:9464", "http://127.0.0.1:9464/metrics"]
)
def test_an_address_may_be_written_in_any_usual_way(address: str) -> None:
    assert url_of(address) == "http://127.0.0.1:9464/metrics"


def test_what_up_printed_names_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"address": "a:1", "processes": [{"metrics": "a:2"}, {"metrics": "a:3"}]})
    file = tmp_path / "up.json"
    file.write_text(said + "\n")
    assert metrics_of([str(file), "a:4", "a:2"]) == ["a:2", "a:3", "a:4"]
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert metrics_of(["-"]) == ["a:2", "a:3"]
    file.write_text("ready")
    with pytest.raises(CommandFailed, match="lists no processes"):
        metrics_of([str(file)])


@pytest.fixture
def orchestrator() -> Iterator[tuple[Metrics, str]]:
    metrics = Metrics("orchestrator")
    server = MetricsServer(metrics, "127.0.0.1", 0, lambda: True)
    yield metrics, f"127.0.0.1:{server.port}"
    server.close()


def test_top_reads_processes_that_serve_metrics(orchestrator: tuple[Metrics, str]) -> None:
    metrics, address = orchestrator
    tokens = metrics.counter("generation_tokens", "", (MODEL,), common=True)
    errors = metrics.counter("request_errors", "", ("reason",))
    store = metrics.gauge("store_up", "")
    store.set(1)
    errors.labels("Overloaded").inc()
    watched = Watched(address)
    watched.look()
    tokens.labels("m").inc(50)
    errors.labels("Overloaded").inc(2)
    said = watched.look()
    assert said["role"] == "orchestrator"
    assert said["tokens_per_second"] > 0
    assert (said["errors"], said["store"]) == ({"Overloaded": 2}, "up")


def test_a_process_that_does_not_answer_is_shown_beside_the_others(
    orchestrator: tuple[Metrics, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = orchestrator
    with pytest.raises(SystemExit) as ended:
        main(["top", address, "127.0.0.1:1", "--once", "--json", "--interval", "0.1"])
    assert ended.value.code == 0
    here, gone = json.loads(capsys.readouterr().out)["processes"]
    assert (here["role"], gone["address"]) == ("orchestrator", "127.0.0.1:1")
    assert "refused" in gone["error"]


def test_no_answer_from_any_process_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "127.0.0.1:1", "--once", "--interval", "0.1"])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert "does not answer" in shown.out
    assert "none of them answers" in shown.err


def test_a_process_s_texts_are_shown_without_markup() -> None:
    from rich.console import Console

    process = {"address": "a:1", "error": "[red]no[/red]"}
    console = Console(file=io.StringIO(), width=150, markup=False)
    console.print(table([process]))
    assert "[red]no[/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_file_of_other_bytes_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CommandFailed, match="is not what `outrider up --json` printed"):
        metrics_of([str(tmp_path / "up.json")])
