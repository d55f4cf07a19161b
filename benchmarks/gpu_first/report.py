"""Lines of results: one JSON object each, written at once, beside what was predicted of them."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = Iterator[tuple[str, dict[str, Any]]]
"""Results of one part of a stage: a name and fields each."""
Part = Callable[[], Results]

PREDICTIONS = Path(__file__).with_name("predictions.json")
_RESULTS = "results.jsonl"


def predictions() -> dict[str, dict[str, Any]]:
    """What is predicted, by "stage.result.field": low, high and why."""
    read: dict[str, dict[str, Any]] = json.loads(PREDICTIONS.read_text())
    return read


@dataclass(frozen=True, slots=True)
class Report:
    """Appends the results of one stage to DIR/results.jsonl and prints them; every line is flushed.

    Args:
        out: folder of the run.
        stage: name of the stage.
        compares: whether results are held against what was predicted of an H200.
    """

    out: Path
    stage: str
    compares: bool = True

    def add(self, name: str, fields: Mapping[str, Any]) -> None:
        """Writes one result, and what was predicted of its fields."""
        line: dict[str, Any] = {"stage": self.stage, "name": name, **fields}
        expected = {
            field: [found["low"], found["high"]]
            for field in (fields if self.compares else ())
            if (found := predictions().get(f"{self.stage}.{name}.{field}"))
        }
        if expected:
            line["predicted"] = expected
            line["missed"] = [
                field for field, (low, high) in expected.items() if not _within(fields[field], low, high)
            ]
        text = json.dumps(line, default=str)
        with (self.out / _RESULTS).open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    def run(self, parts: Mapping[str, Part], seconds: float) -> int:
        """Runs the parts in order while the time lasts; returns how many failed.

        A part that fails is a line with its error, and the next part begins.
        """
        ends = time.monotonic() + seconds
        failed = 0
        for name, part in parts.items():
            if time.monotonic() > ends:
                self.add(name, {"skipped": f"the stage's {seconds:.0f} s are over"})
                continue
            began = time.monotonic()
            try:
                for result, fields in part():
                    self.add(result, fields)
            except Exception as error:
                # Drivers, compilers and libraries raise errors of every class, and the next part may work.
                failed += 1
                traceback.print_exc(file=sys.stderr)
                self.add(name, {"error": f"{type(error).__name__}: {error}"[:2000]})
            self.add(f"{name}_took", {"seconds": round(time.monotonic() - began, 2)})
        return failed


def results(out: Path) -> list[dict[str, Any]]:
    """All results of a run so far."""
    path = out / _RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high
