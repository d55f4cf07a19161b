"""Draws a benchmark's result as an SVG file, with matplotlib.

Run as `python -m benchmarks.plots.draw RESULT.json FILE.svg` on a last line that was kept.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots.curves import Chart, Curve, Panel, chart_of

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.6
"""Inches of a panel."""


def svg_path(text: str) -> Path:
    """A path that a chart can be written to.

    Raises:
        argparse.ArgumentTypeError: the name does not end in .svg, the folder is missing, or matplotlib is.
    """
    path = Path(text)
    if path.suffix != ".svg":
        raise argparse.ArgumentTypeError(f"{text}: a chart is written as SVG; the name must end in .svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install 'outrider[plot]'")
    return path


def draw(chart: Chart, file: Path) -> None:
    """Writes the chart; the same chart gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text: small files, and words that can be searched.
    small = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": "outrider"}
    with matplotlib.rc_context({**small, "font.size": 9, "lines.linewidth": 1.2}):
        figure = Figure(figsize=(PANEL_WIDTH * len(chart.panels), PANEL_HEIGHT), layout="constrained")
        figure.suptitle(chart.title, fontsize=8)
        for axes, panel in zip(
            figure.subplots(1, len(chart.panels), squeeze=False)[0], chart.panels, strict=True
        ):
            _draw_panel(axes, panel)
        figure.savefig(file, format="svg", metadata={"Date": None})


def _draw_panel(axes: Any, panel: Panel) -> None:
    if all(isinstance(x, str) for curve in panel.curves for x in curve.x):
        _draw_bars(axes, panel.curves)
    else:
        _draw_lines(axes, panel)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, frameon=False)


def _draw_bars(axes: Any, curves: Sequence[Curve]) -> None:
    width = 0.8 / len(curves)
    for number, curve in enumerate(curves):
        places = [place + number * width for place in range(len(curve.x))]
        axes.bar(places, curve.y, width, align="edge", label=curve.label)
        axes.set_xticks([place + 0.4 for place in range(len(curve.x))], curve.x, fontsize=6)


def _draw_lines(axes: Any, panel: Panel) -> None:
    colours: dict[str, str] = {}
    for curve in panel.curves:
        colour = colours.setdefault(curve.colour_of or curve.label, f"C{len(colours)}")
        style = "--" if curve.is_reference else "-"
        axes.plot(curve.x, curve.y, style, color=colour, marker="o", markersize=3, label=curve.label)
    if panel.is_log_x:
        axes.set_xscale("log", base=2)
    places = sorted({x for curve in panel.curves for x in curve.x})
    axes.set_xticks(places, [f"{place:,g}" for place in places])
    axes.minorticks_off()


def main() -> None:
    """Draws a result that was kept in a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots.draw", description=__doc__)
    parser.add_argument("result", type=Path, help="file whose last line is a benchmark's result")
    parser.add_argument("file", type=svg_path, help="SVG file to write")
    given = parser.parse_args()
    draw(chart_of(json.loads(given.result.read_text().splitlines()[-1])), given.file)


if __name__ == "__main__":
    main()
