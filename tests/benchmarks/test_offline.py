"""The offline benchmark runs small, end to end, and what it prints is what its schema says."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest


@pytest.mark.slow
def test_the_offline_benchmark_prints_what_its_schema_says_and_finds_the_ids_identical(
    bench: Callable[..., dict[str, Any]],
) -> None:
    result = bench("offline", "--prompts", "1", "--tokens", "8", "--repeats", "1")
    assert result["identical"] is True
    assert result["sampled"]["identical"] is True


def test_the_schema_refuses_a_field_that_nobody_described(schema_of: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "offline", "surprise": 1}, schema_of("offline"))
