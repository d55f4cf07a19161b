"""What an experiment is: a question, predictions that were stated first, and what decides them.

Predictions are data that the result carries, so that a result shows what it was held against. Knows nothing
of models and of what is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.experiments.pair import ModelPair, Scale
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key

Row = Mapping[str, Any]
Rows = Sequence[Row]


@dataclass(frozen=True, slots=True)
class Judged:
    """What was measured about one prediction."""

    measured: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Experiment:
    """One open question, and how it is put to the models."""

    name: str
    question: str
    predictions: tuple[str, ...]
    """What was expected before the experiment ran for the first time."""
    refuted_by: str
    """What would show that the idea behind the predictions is wrong."""
    keys: Callable[[Scale], Sequence[Key]]
    """The arms; each is measured apart, and kept."""
    measure: Callable[[ModelPair, Key], dict[str, Any]]
    """Measures one arm: a row of the result."""
    judge: Callable[[Rows], Sequence[Judged]]
    """One verdict for each prediction, in their order."""
    panels: Callable[[Rows], Sequence[Panel]]
    """The result as curves."""


def fields_of(experiment: Experiment, rows: Rows) -> dict[str, Any]:
    """The result's fields: predictions beside what was measured, all rows, and the curves."""
    verdicts = experiment.judge(rows)
    claims = [
        {"predicted": predicted, **asdict(judged)}
        for predicted, judged in zip(experiment.predictions, verdicts, strict=True)
    ]
    return {
        "experiment": experiment.name,
        "question": experiment.question,
        "refuted_by": experiment.refuted_by,
        "claims": claims,
        "holds": all(judged.holds for judged in verdicts),
        "rows": list(rows),
        "panels": [asdict(panel) for panel in experiment.panels(rows)],
    }


def line(label: str, rows: Rows, x: str, y: str, *, is_reference: bool = False) -> Curve:
    """A curve through one point for each row."""
    return Curve(label, tuple(row[x] for row in rows), tuple(row[y] for row in rows), is_reference)


def where(rows: Rows, **values: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def only(rows: Rows, **values: object) -> Row:
    """The only row with these values. Raises ValueError where no row or several rows have these values."""
    (row,) = where(rows, **values)
    return row
