"""Charts of results: which lines they have, and that drawing writes an SVG file of them."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots.curves import Curve, chart_of
from benchmarks.plots.draw import draw, svg_path
from benchmarks.shared.envelope import command_line, settings_of

MACHINE = {"processor": "a processor", "cores": 2, "memory_mb": 1, "python": "3.11"}


def result(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "commit": "abc", "machine": MACHINE} | fields


LOAD = result(
    "load",
    concurrency=[1, 8],
    tokens_per_second={"plain": [100.0, 300.0], "budget": [200.0, 310.0]},
    gap_ms={"plain": [{"p50": 1.0, "p99": 2.0}] * 2, "budget": [{"p50": 3.0, "p99": 4.0}] * 2},
)
VOCABULARY = result(
    "vocabulary",
    tokens_per_second={"4096": {"greedy": {"flat": {"8": 50.0, "1": 20.0}}}},
    generate_tokens_per_second={"4096": {"greedy": {"flat": {"1": 10.0}}}},
)
RETRIEVAL = result(
    "retrieval",
    corpus_by_tokens={"1000": 1.5, "10": 1.2},
    acceptance_length_by={"session_only": 1.0, "past_0": 2.0, "past_100": 5.0},
    past_by_arctic={"past_0": None},
)
CHAOS = result(
    "chaos",
    by_fault={
        "verifier": {"kill": {"p50": 0.5, "p99": 9.0, "faults": 3}},
        "drafter": {"slow": {"p50": None, "p99": None, "faults": 1}},
    },
)
PEERS = result(
    "peers",
    tokens_per_second={
        "outrider_plain": {"0.0": {"1": {"1": 100.0, "2": 120.0}, "8": {"1": 300.0}}},
        "hf_generate": {"0.0": {"1": {"1": 90.0, "2": 95.0}, "8": {"1": 250.0}}},
        "hf_assisted": {"0.0": {"1": {"1": 110.0, "2": 115.0}}},
    },
)
RESULTS = (LOAD, VOCABULARY, RETRIEVAL, CHAOS, PEERS)


def test_load_is_drawn_as_rates_and_gaps_over_streams() -> None:
    rates, gaps = chart_of(LOAD).panels

    assert rates.curves == (Curve("plain", (1, 8), (100.0, 300.0)), Curve("budget", (1, 8), (200.0, 310.0)))
    assert gaps.curves[0].y == (2.0, 2.0)


def test_the_vocabulary_benchmark_is_drawn_by_vocabulary_and_head_with_generate_dashed() -> None:
    (panel,) = chart_of(VOCABULARY).panels

    assert panel.title == "4,096 ids, flat head"
    assert panel.curves == (
        Curve("greedy", (1.0, 8.0), (20.0, 50.0)),
        Curve("generate, greedy", (1.0,), (10.0,), is_reference=True, colour_of="greedy"),
    )


def test_retrieval_leaves_out_a_memory_that_was_not_measured() -> None:
    corpus, past = chart_of(RETRIEVAL).panels

    assert corpus.curves == (Curve("corpus", (10.0, 1000.0), (1.2, 1.5)),)
    assert past.curves == (Curve("ours", (0.0, 100.0), (2.0, 5.0)),)


def test_the_pauses_of_chaos_are_drawn_by_fault_and_without_faults_that_met_no_stream() -> None:
    (panel,) = chart_of(CHAOS).panels

    assert panel.curves == (
        Curve("p50", ("verifier\nkill (3)",), (0.5,)),
        Curve("p99", ("verifier\nkill (3)",), (9.0,)),
    )


def test_an_arm_stands_only_in_panels_of_settings_that_it_has() -> None:
    one, eight = chart_of(PEERS).panels

    assert [curve.label for curve in one.curves] == ["threads: 1", "threads: 2"]
    assert one.curves[1] == Curve(
        "threads: 2", ("outrider\nplain", "hf\ngenerate", "hf\nassisted"), (120.0, 95.0, 115.0)
    )
    assert eight.curves == (Curve("threads: 1", ("outrider\nplain", "hf\ngenerate"), (300.0, 250.0)),)


@pytest.mark.parametrize("drawn", RESULTS, ids=[drawn["name"] for drawn in RESULTS])
def test_every_chart_becomes_a_small_svg_file_with_its_labels_as_text(
    drawn: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    chart = chart_of(drawn)
    for file in files:
        draw(chart, file)

    one, two = (file.read_text() for file in files)
    assert all(
        curve.label in one for panel in chart.panels for curve in panel.curves if "\n" not in curve.label
    )
    assert len(one) < 60_000
    assert one == two


def test_a_plot_needs_the_extra_and_says_so_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(argparse.ArgumentTypeError, match=r"pip install 'outrider\[plot\]'"):
        svg_path("load.svg")


@pytest.mark.parametrize("path", ["load.png", "nowhere/load.svg"])
def test_a_plot_goes_to_an_svg_file_in_a_folder_that_exists(path: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=path):
        svg_path(path)


def test_a_benchmark_without_a_curve_has_no_plot(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("http", None).parse_args(["--plot", "http.svg"])

    assert "unrecognized arguments: --plot" in capsys.readouterr().err


def test_the_plots_file_is_no_setting_of_the_result() -> None:
    flags = command_line("load", None, is_curve=True).parse_args(["--json"])

    assert settings_of(flags) == {}
