"""Draws a document's table of figures as an SVG file, so that picture and table cannot differ.

Run as `python -m benchmarks.plots.table README.md FILE.svg`. The table is the document's first one whose
head begins with "tokens per second"; its columns are "STREAMS, KIND", and an empty cell has no bar.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots.curves import Chart, Curve, Panel
from benchmarks.plots.draw import draw, svg_path

UNIT = "tokens per second"


def chart_of_table(document: str) -> Chart:
    """The chart of a document's first table of rates. Raises ValueError for a document without one."""
    rows = _rows(document)
    streams = [column.partition(", ")[0] for column in rows[0][1:]]
    panels = [_panel(rows, streams, which) for which in dict.fromkeys(streams)]
    return Chart(rows[0][0], tuple(panels))


def _rows(document: str) -> list[list[str]]:
    """Cells of the table, the head first."""
    lines = document.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith(f"| {UNIT}")), None)
    if first is None:
        raise ValueError(f"no table begins with {UNIT!r}")
    last = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
    table = [lines[first], *lines[first + 2 : last]]  # without the line of dashes
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]


def _panel(rows: Sequence[Sequence[str]], streams: Sequence[str], which: str) -> Panel:
    columns = [column for column, name in enumerate(streams, start=1) if name == which]
    kinds = tuple(rows[0][column].partition(", ")[2] for column in columns)
    # Arms without a figure here keep their colour in every panel.
    curves = [Curve(row[0], kinds, tuple(_number(row[column]) for column in columns)) for row in rows[1:]]
    return Panel(which, "", UNIT, tuple(curves))


def _number(cell: str) -> float:
    """A cell's number, which may have commas between thousands; NaN where the cell is empty."""
    return float(cell.replace(",", "") or math.nan)


def main() -> None:
    """Draws the table of a document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots.table", description=__doc__)
    parser.add_argument("document", type=Path, help="Markdown file with the table")
    parser.add_argument("file", type=svg_path, help="SVG file to write")
    given = parser.parse_args()
    draw(chart_of_table(given.document.read_text(encoding="utf-8")), given.file)


if __name__ == "__main__":
    main()
