"""docs/evidence.md has a verdict for every method of the surveys, and no figure without its command."""

import re

import pytest
from source import ROOT

from benchmarks.experiments.__main__ import EXPERIMENTS

TEXT = (ROOT / "docs" / "evidence.md").read_text()
FIGURES = ROOT / "docs" / "figures"
VERDICT = r"\*\*(works|work|not worth it here|not possible here|not built)\b"
COMMAND = r"`(outrider|python|pytest)\b[^`]*`"
SURVEYED = {
    "Table 1: ways to draft": (
        *("heads on the target", "non-autoregressive model", "mask-predict"),
        *("small model", "early exit", "layer skipping"),
    ),
    "Table 2: ways to verify": ("greedy", "nucleus", "approximate criteria", "token trees"),
    "Table 3: methods": (
        *("SpecDec", "SpS", "BiLD", "SpecInfer", "DistillSpec", "Online Speculative", "CS Drafting", "REST"),
        *("Blockwise", "Medusa", "PPD", "Self-Speculative", "parallel decoding", "Lookahead", "PaSS"),
    ),
    "Methods that later surveys name": (
        "EAGLE",
        "Hydra",
        "PLD",
        "RaLMSpec",
        "LLMCad",
        "SAD",
        "retrieval-augmented",
    ),
}
"""Tables of the page, and words that name the rows that the survey's tables have."""
PARAGRAPHS = dict(
    re.findall(r"^### (X\d+|leak):[^\n]*\n(.*?)(?=^#|\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
)


def rows_of(table: str) -> list[str]:
    section = TEXT.partition(f"## {table}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


ROWS = [row for table in SURVEYED for row in rows_of(table)]


def named(row: str) -> str:
    return row.strip("| ")[:40]


@pytest.mark.parametrize("table", SURVEYED)
def test_every_row_of_the_surveys_tables_has_a_line(table: str) -> None:
    rows = [row.rpartition("| **")[0] or row for row in rows_of(table)]

    assert [name for name in SURVEYED[table] if not any(name in row for row in rows)] == []


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_line_has_a_verdict_and_none_waits_for_a_measurement(row: str) -> None:
    assert re.search(VERDICT, row)
    assert "not measured yet" not in row


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_line_with_a_figure_has_its_command_or_the_paragraph_that_has_it(row: str) -> None:
    verdict = row.rpartition(" | ")[2]
    if re.search(r"\d\.\d|\.\d\d|\d %", verdict):
        assert re.search(COMMAND, verdict) or re.search(r"\]\(#", verdict)


@pytest.mark.parametrize("name", ["X1", *EXPERIMENTS])
def test_every_experiment_has_a_paragraph_with_its_command_and_a_picture_with_command_and_commit(
    name: str,
) -> None:
    command = "spec-bench" if name == "X1" else f"experiments {name}"
    paragraph = PARAGRAPHS[name]
    picture = (FIGURES / f"{name}.svg").read_text()

    assert re.search(rf"`outrider bench {command}\b[^`]*--json", paragraph)
    assert f"(figures/{name}.svg)" in paragraph
    assert re.search(
        rf"outrider bench {command.replace('-', '[-_]')}\b[^<]*, commit [0-9a-f]{{12}}<", picture
    )
