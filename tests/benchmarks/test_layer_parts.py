"""The target's own layers as drafters: what is measured runs small, and is what its schema says."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.envelope import MODELS
from outrider.lm.load.model import load_model
from outrider.lm.load.part import ModelPart


@pytest.fixture
def short_target(tmp_path: Path) -> Path:
    """The embedded target's first three layers."""
    model = load_model(str(MODELS / "target"), device="cpu", dtype="float32")
    ModelPart(first=3).apply(model)
    model.save_pretrained(tmp_path)
    shutil.copy(MODELS / "target" / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_parts_of_the_target_print_what_their_schema_says(
    bench: Callable[..., dict[str, Any]], short_target: Path
) -> None:
    result = bench("layer_parts", "--target", str(short_target), "--prompts", "1", "--tokens", "6")
    for mode in result["modes"].values():
        assert [row["layers"] for row in mode["by_exit"]] == [1, 2]
        assert all(row["hit_4"] >= row["hit_1"] for row in mode["by_exit"])
        assert [row["sublayers"] for row in mode["by_skipped"]] == [2, 4]
        assert [len(row["skipped"]) for row in mode["by_skipped"]] == [1, 2]
        assert [row["sublayers"] for row in mode["by_sublayers"]] == [1, 2, 3, 4, 5]
        assert all(0 <= row["break_even"] <= 1 for row in mode["by_sublayers"])
