"""Draws a benchmark's result as an SVG file, with matplotlib.

Run as `python -m benchmarks.plots.draw RESULT.json FILE.svg` on a last line that was kept.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

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


def draw(chart: Chart, file: Path | TextIO) -> None:
    """Writes the chart; the same chart gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text: small files, and words that can be searched.
    small: Any = {
        **{"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": "outrider"},
        **{"font.size": 9, "lines.linewidth": 1.2},
    }
    with matplotlib.rc_context(small):
        figure = Figure(figsize=(PANEL_WIDTH * len(chart.panels), PANEL_HEIGHT), layout="constrained")
        figure.suptitle(chart.title, fontsize=8)
        row = figure.subplots(1, len(chart.panels), squeeze=False)[0]
        for axes, panel in zip(row, chart.panels, strict=True):
            _draw_panel(axes, panel)
        _add_legends(figure, row, chart.panels)
        figure.savefig(file, format="svg", metadata={"Date": None})


def _draw_panel(axes: Any, panel: Panel) -> None:
    if _has_bars(panel):
        _draw_bars(axes, panel.curves)
    elif panel.is_scatter:
        _draw_scatter(axes, panel.curves)
    else:
        _draw_lines(axes, panel)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, axis="y")


def _add_legends(figure: Any, row: Sequence[Any], panels: Sequence[Panel]) -> None:
    """One legend below panels of the same bars, which leave no room for it; else a legend in each panel."""
    labels = {tuple(curve.label for curve in panel.curves) for panel in panels}
    if len(labels) == 1 and all(map(_has_bars, panels)):
        bars, names = row[0].get_legend_handles_labels()
        figure.legend(bars, names, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
        return
    for axes, panel in zip(row, panels, strict=True):
        if not panel.is_scatter:
            axes.legend(fontsize=7, frameon=False)


def _has_bars(panel: Panel) -> bool:
    return all(isinstance(x, str) for curve in panel.curves for x in curve.x)


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


def _draw_scatter(axes: Any, curves: Sequence[Curve]) -> None:
    """Points with their names, and lines from the left edge to where they leave the points' rectangle."""
    points = [curve for curve in curves if not curve.is_reference]
    top = 1.2 * max(0.1, *(y for curve in points for y in curve.y))
    right = 1.1 * max(0.1, *(float(x) for curve in points for x in curve.x))
    for line in (curve for curve in curves if curve.is_reference):
        slope = (line.y[-1] - line.y[0]) / (float(line.x[-1]) - float(line.x[0]))
        end = min(right, (top - line.y[0]) / slope)
        axes.plot(line.x, line.y, "--", color="0.7", linewidth=0.8)
        axes.annotate(
            line.label, (end, line.y[0] + slope * end), fontsize=6, color="0.5", ha="right", va="top"
        )
    for number, point in enumerate(points):
        axes.plot(point.x, point.y, "o", color=f"C{number}", markersize=4)
        place = (point.x[0], point.y[0])
        axes.annotate(point.label, place, (4, 2), textcoords="offset points", fontsize=7, color=f"C{number}")
    axes.set(xlim=(0, right), ylim=(0, top))


def main() -> None:
    """Draws a result that was kept in a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots.draw", description=__doc__)
    parser.add_argument("result", type=Path, help="file whose last line is a benchmark's result")
    parser.add_argument("file", type=svg_path, help="SVG file to write")
    given = parser.parse_args()
    draw(chart_of(json.loads(given.result.read_text().splitlines()[-1])), given.file)


if __name__ == "__main__":
    main()
