"""How far a model is loaded, as transformers reads its weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils.logging import set_tqdm_hook

from outrider.lm.load.model import load_model
from outrider.lm.load.progress import follow_loading


@pytest.fixture
def told() -> Iterator[list[tuple[int, int]]]:
    found: list[tuple[int, int]] = []
    follow_loading(lambda done, of: found.append((done, of)))
    yield found
    set_tqdm_hook(None)


def test_tensors_are_counted_from_none_to_all(
    tiny_llama: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.lm.load.progress.EVERY_S", 0.0)
    model = load_model(str(tiny_llama), device="cpu", dtype="float32")
    of = len(list(model.parameters()))
    assert told == [(0, of), *((done, of) for done in range(of)), (of, of)]
