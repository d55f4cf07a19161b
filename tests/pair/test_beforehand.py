"""Tokenizers of two models are compared by their files, before a model is loaded."""

import shutil
from pathlib import Path

import pytest

from outrider.pair import beforehand
from outrider.pair.beforehand import tokenizer_difference


def without_weights(model: Path, folder: Path) -> str:
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        folder.mkdir(exist_ok=True)
        shutil.copy(model / file, folder)
    return str(folder)


def test_tokenizer_files_suffice_and_equal_ones_are_read_without_transformers(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beforehand, "_as_loaded", lambda model: pytest.fail("it was loaded"))
    target = without_weights(tiny_llama, tmp_path / "target")
    assert tokenizer_difference(target, without_weights(tiny_llama_b, tmp_path / "drafter")) == ""


def test_the_first_difference_is_named(tiny_llama: Path, tiny_writer: Path, tmp_path: Path) -> None:
    target = without_weights(tiny_llama, tmp_path / "target")
    drafter = without_weights(tiny_writer, tmp_path / "drafter")
    assert tokenizer_difference(target, drafter).startswith("id 2 is \"'\" in the target's")


def test_a_file_that_cannot_be_read_is_left_to_its_service(tiny_llama: Path, tmp_path: Path) -> None:
    target = Path(without_weights(tiny_llama, tmp_path / "target"))
    drafter = Path(without_weights(tiny_llama, tmp_path / "drafter"))
    text = (drafter / "tokenizer.json").read_text()
    (drafter / "tokenizer.json").write_text(text[: len(text) // 2])
    assert tokenizer_difference(str(target), str(drafter)) == ""


def test_a_model_that_cannot_be_looked_up_is_left_to_its_service(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert tokenizer_difference(str(tiny_llama), "nobody/nothing@main") == ""
