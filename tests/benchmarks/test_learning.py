"""The shift of domain runs small, and what is printed is what the schema says."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from benchmarks.learning import __main__ as learning
from benchmarks.learning.served_pairs import learning_settings
from benchmarks.learning.students import rounds, runs
from drafter_service.settings import DrafterSettings


@pytest.mark.slow
def test_a_shift_without_a_lesson_prints_what_its_schema_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    schema_of: Callable[..., dict[str, Any]],
) -> None:
    flags = ["--code", "1", "--prose", "2", "--every", "1000000", "--pairs", "0"]
    monkeypatch.setattr(sys, "argv", ["learning", "--json", *flags])
    threads = torch.get_num_threads()
    learning.main()
    torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    jsonschema.validate(result, schema_of("learning"))
    for student in (result["drafter"], result["head"]):
        assert [phase["requests"] for phase in student["phases"].values()] == [1, 1, 1, 1]
        assert all(phase["frozen"] == phase["learning"] for phase in student["phases"].values())
        assert student["swaps"] == 0


def test_the_drafter_of_the_pairs_has_settings_that_let_it_learn(tmp_path: Path) -> None:
    prefix = "OUTRIDER_DRAFTER__"
    given = {name.removeprefix(prefix).lower(): v for name, v in learning_settings(tmp_path, 9).items()}

    settings = DrafterSettings(model="models/drafter", device="cpu", **given)  # type: ignore[arg-type]

    assert (settings.learn, settings.learn_every, settings.learn_dir) == ("public", 9, tmp_path)


@pytest.mark.slow
def test_a_drafter_that_learns_changes_no_id_of_the_pairs(bench: Callable[..., dict[str, Any]]) -> None:
    flags = ("--code", "1", "--prose", "2", "--every", "1000000", "--head", "", "--pairs", "2")
    result = bench("learning", *flags, "--pairs-every", "1")
    assert result["head"] is None
    assert result["pairs"]["identical"]
    assert result["pairs"]["learning_over_frozen"]["pairs"] == 2


@pytest.mark.parametrize(
    ("agreed", "count"),
    [([1] * 9 + [0], 2), ([0] * 4, 4), ([1, 0, 1, 1, 0], 2), ([1, 1, 1, 1, 1], 1), ([1], 1)],
)
def test_a_round_commits_what_agrees_of_its_chain_and_one_token_more(agreed: list[int], count: int) -> None:
    assert rounds(runs(np.array(agreed, dtype=bool), 4)) == count
