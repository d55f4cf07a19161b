"""Charts of results: which lines they have, and that drawing writes an SVG file of them."""

import argparse
import importlib.util
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots.curves import Curve, chart_of
from benchmarks.plots.draw import draw, svg_path
from benchmarks.plots.table import chart_of_table
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
PACKED = result(
    "packed_step",
    ms={"own_1": 4.0, "own_8": 9.0, "packed_1x1": 3.0, "packed_1x8": 5.0, "packed_4x8": 9.0},
)
README = Path(__file__).parents[2] / "README.md"


def heights(svg: str) -> list[str]:
    """The bars of a picture, as paths."""
    return re.findall(r'<g id="patch_\d+">\s*<path d="([^"]*)"', svg)


PROPOSERS = result(
    "proposers",
    figures={
        "greedy": {
            "1": {
                "plain": {"acceptance_length": 1.0, "draft_ms": 0.0, "round_ms": 5.0},
                "eagle": {"acceptance_length": 2.5, "draft_ms": 1.0, "round_ms": 7.0},
            }
        }
    },
)
SPEC_BENCH = result(
    "spec_bench",
    tasks={
        task: {"plain": {"mat": 1.0, "speedup": 1.0}, "lookup": {"mat": mat, "speedup": 1.5}}
        for task, mat in (("two_turns", 2.0), ("overall", 1.8))
    },
)
COMPARE = result(
    "compare",
    figures={
        name: {
            level: {
                "tokens_per_second": 10.0 * int(level),
                "first_token_ms": {"p50": 3.0, "p99": 9.0},
                "gap_ms": {"p50": 1.0, "p99": 2.0},
            }
            for level in ("16", "2")
        }
        for name in ("ours", "theirs")
    },
)
RESULTS = (LOAD, VOCABULARY, RETRIEVAL, CHAOS, PEERS, PACKED, PROPOSERS, SPEC_BENCH, COMPARE)


def test_spec_bench_is_drawn_as_bars_of_tasks() -> None:
    mat, speed = chart_of(SPEC_BENCH).panels

    assert mat.curves[1] == Curve("lookup", ("two\nturns", "overall"), (2.0, 1.8))
    assert speed.curves[0].y == (1.0, 1.0)


def test_a_comparison_is_drawn_over_requests_at_a_time_in_order() -> None:
    rates, first, gaps = chart_of(COMPARE).panels

    assert rates.curves[0] == Curve("ours", (2.0, 16.0), (20.0, 160.0))
    assert (first.curves[1].y, gaps.curves[1].y) == ((3.0, 3.0), (2.0, 2.0))


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


def test_parts_of_layers_are_drawn_by_skipped_sublayers_with_the_break_even_dashed() -> None:
    def row(sublayers: int, acceptance: float, break_even: float) -> dict[str, float]:
        return {"sublayers": sublayers, "acceptance": acceptance, "break_even": break_even}

    found = {"by_sublayers": [row(2, 0.8, 0.9), row(1, 0.9, 0.95)], "by_skipped": [row(2, 0.7, 0.88)]}
    (panel,) = chart_of(result("layer_parts", modes={"greedy": found})).panels

    assert panel.curves == (
        Curve("sublayers", (1, 2), (0.9, 0.8)),
        Curve("break-even, sublayers", (1, 2), (0.95, 0.9), is_reference=True, colour_of="sublayers"),
        Curve("whole layers", (2,), (0.7,)),
        Curve("break-even, whole layers", (2,), (0.88,), is_reference=True, colour_of="whole layers"),
    )


def test_proposers_are_points_between_lines_of_equal_speed() -> None:
    (panel,) = chart_of(PROPOSERS).panels
    point, *lines = panel.curves

    assert point == Curve("eagle", (1.0,), (1.5,))
    assert [line.label for line in lines] == ["1x plain", "1.5x plain", "2x plain"]
    for line, speed in zip(lines, (1.0, 1.5, 2.0), strict=True):
        assert line.is_reference
        for x, y in zip(line.x, line.y, strict=True):
            # Tokens of a round over its time, beside plain decoding's one token in 5 ms.
            assert (1 + y) / (5 + x) == pytest.approx(speed / 5)


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


def test_a_pass_is_drawn_over_the_rows_of_one_session() -> None:
    (panel,) = chart_of(PACKED).panels

    assert panel.curves == (
        Curve("own", (1.0, 8.0), (4.0, 9.0), is_reference=True),
        Curve("packed", (1.0, 8.0), (3.0, 5.0)),
    )


def test_a_documents_table_is_drawn_with_a_panel_for_each_number_of_streams() -> None:
    chart = chart_of_table(
        "text\n| tokens per second, all | 1 stream, greedy | 8 streams, greedy | 8 streams, sampled |\n"
        "|---|---:|---:|---:|\n| ours | 3 | 9 | 8 |\n| `theirs` | 2 | | 7 |\n\n| another | table |\n"
    )

    one, eight = chart.panels
    assert (chart.title, one.title, eight.title) == ("tokens per second, all", "1 stream", "8 streams")
    assert one.curves == (Curve("ours", ("greedy",), (3.0,)), Curve("theirs", ("greedy",), (2.0,)))
    assert eight.curves[1].x == ("greedy", "sampled")
    assert math.isnan(eight.curves[1].y[0])


def test_the_readmes_picture_is_of_its_table() -> None:
    """Whoever changes a figure draws the picture again: the command stands in docs/figures.md."""
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    drawn = io.StringIO()
    draw(chart_of_table(README.read_text()), drawn)
    kept = (README.parent / "docs/figures/peers.svg").read_text()

    assert heights(kept) == heights(drawn.getvalue())
    assert len(heights(kept)) > 20


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


def test_edge_is_drawn_by_round_trip_without_links_that_lose() -> None:
    row = [8.0, 20.0, 9.0]
    result = {
        "name": "edge",
        "commit": "c",
        "machine": {"processor": "p", "cores": 2},
        "rtt_ms": [1, 100, 100],
        "loss": [0, 0, 0.01],
        "ms_per_token": {"cloud": row},
        "predicted_ms_per_token": {"cloud": row},
        "rounds_per_token": {"cloud": row, "economy": row},
    }
    time, passes = chart_of(result).panels
    assert [(curve.label, curve.x, curve.y) for curve in time.curves] == [
        ("cloud", (1, 100), (8.0, 20.0)),
        ("cloud, predicted", (1, 100), (8.0, 20.0)),
    ]
    assert [curve.label for curve in passes.curves] == ["cloud", "economy"]
