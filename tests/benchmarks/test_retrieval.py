"""The retrieval benchmark runs small, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_the_retrieval_benchmark_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    small = ["--tokens", "100000", "--insert-tokens", "20000", "--lookups", "50", "--prompts", "1"]
    small += ["--past", "100", "--new-tokens", "16", "--distractors", "3"]
    result = bench("retrieval", *small, timeout_s=600)
    gained = result["acceptance_length_by"]
    assert gained["past_100"] > gained["past_0"]
    assert result["build"]["bytes_per_token"] < 9
