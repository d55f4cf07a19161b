"""Held-out text and its near-copies stay out of training."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from outrider import near_copies
from training import corpus, heldout, prompts, tokenizer

MODELS = Path(__file__).parents[2] / "models"
PACKAGED_APART = {"idlelib", "lib2to3", "tkinter"}
"""Parts of the standard library that Linux distributions leave out of their `python3`."""


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return tokenizer.load(MODELS / "target" / "tokenizer.json")


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return corpus.stdlib()


@pytest.fixture(scope="module")
def committed() -> list[str]:
    return [text.prompt + text.continuation for text in prompts.read(MODELS / "heldout.jsonl")]


def test_a_window_is_shared_wherever_it_stands() -> None:
    shared = list(range(near_copies.WINDOW))
    assert near_copies.windows([7, *shared])[1] == near_copies.windows([*shared, 9])[0]


def test_a_text_shorter_than_a_window_has_none() -> None:
    assert len(near_copies.windows([1] * (near_copies.WINDOW - 1))) == 0


def test_the_order_of_tokens_matters() -> None:
    ids = list(range(near_copies.WINDOW))
    assert near_copies.windows(ids)[0] != near_copies.windows(ids[::-1])[0]


def test_a_tenth_of_shared_windows_makes_a_near_copy_and_less_does_not() -> None:
    held = list(range(1000, 1000 + near_copies.WINDOW + 9))  # ten windows
    files = {
        "copy": [*held, *range(2000, 2090)],  # 10 of 100
        "cousin": [*held, *range(2000, 2091)],  # 10 of 101
    }
    assert heldout.near_copies(files, [held]) == ["copy"]


def test_every_held_out_module_is_in_the_standard_library(files: dict[str, str]) -> None:
    missing = set(heldout.NAMES) - set(files)
    assert {name.partition("/")[0] for name in missing} <= PACKAGED_APART


def test_every_committed_text_is_a_verbatim_run_of_its_module(files: dict[str, str]) -> None:
    here = f"CPython {platform.python_version()} Lib/"
    for text in prompts.read(MODELS / "heldout.jsonl"):
        if text.origin.startswith(here):  # another release may have changed it
            assert text.prompt + text.continuation in files[text.name]


def test_tests_tables_and_installed_packages_are_not_read(files: dict[str, str]) -> None:
    parts = {part for name in files for part in name.split("/")}
    assert parts.isdisjoint({"test", "tests", "site-packages", "encodings", "pydoc_data"})


@pytest.mark.slow
def test_no_training_file_nearly_copies_held_out_text(
    bpe: Tokenizer, files: dict[str, str], committed: list[str]
) -> None:
    train, held = corpus.training_files(bpe, files, committed)
    known = [*held.values(), *(bpe.encode(text).ids for text in committed)]
    assert len(train) > 400
    assert set(train).isdisjoint(heldout.NAMES)
    assert heldout.near_copies(train, known) == []


def test_a_planted_near_copy_of_a_held_out_module_is_left_out(bpe: Tokenizer, files: dict[str, str]) -> None:
    sample = {name: files[name] for name in ("heapq.py", "queue.py", "bisect.py", "ast.py")}
    sample["vendored/heapq.py"] = files["ast.py"][:20_000] + files["heapq.py"].replace("heappush", "push")
    train, _ = corpus.training_files(bpe, sample, [])
    assert sorted(train) == ["ast.py", "bisect.py"]


def test_a_planted_copy_of_a_committed_text_is_left_out(
    bpe: Tokenizer, files: dict[str, str], committed: list[str]
) -> None:
    sample = {name: files[name] for name in ("queue.py", "bisect.py")}
    sample["answers.py"] = "\n".join(committed)
    train, _ = corpus.training_files(bpe, sample, committed)
    assert sorted(train) == ["bisect.py"]
