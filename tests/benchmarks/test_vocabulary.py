"""The vocabulary benchmark: its random models are what they claim, and it prints what its schema says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.vocabulary.random_model import END, nucleus_of, scale_for, tokenizer_of_size
from outrider.tokens import TokenTable


def test_a_tokenizer_of_any_size_reads_and_writes_any_text() -> None:
    tokenizer = tokenizer_of_size(1000)
    table = TokenTable.from_json(tokenizer.backend_tokenizer.to_str())
    text = "plain words, tabs\tand ünïcödé"

    assert table.size == 1000
    assert b"".join(table.token_bytes(id_) for id_ in table.encode(text)).decode() == text
    assert tokenizer.convert_tokens_to_ids(END) in table.special_ids


def test_a_nucleus_counts_the_ids_that_reach_the_mass() -> None:
    rows = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.95, 0.03, 0.01, 0.01]]))

    assert nucleus_of(rows, 1.0, 0.9) == (1, 3, 3)


def test_a_peaked_head_has_the_median_nucleus_that_was_asked_for() -> None:
    rows = np.random.default_rng(0).normal(size=(64, 4096))

    scale = scale_for(rows, 0.8, 0.9)

    assert 30 <= nucleus_of(rows * scale, 0.8, 0.9).median <= 60


@pytest.mark.slow
def test_the_vocabulary_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench(
        *("vocabulary", "--ids", "600", "--streams", "1,2", "--heads", "peaked", "--tokens", "8"),
        *("--generate-tokens", "8", "--repeats", "1", "--passes", "eager"),
    )

    assert result["nucleus"]["600"]["peaked"]["median"] > 10
    assert set(result["tokens_per_second"]["600"]["greedy"]["peaked"]) == {"1", "2"}
