"""Targets that verify chains: what is measured runs small, and is what its schema says."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_a_family_of_each_kind_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    flags = ("--layers", "2", "--prompts", "1", "--prompt-tokens", "12", "--tokens", "6")
    families = bench("chain_targets", "--families", "llama,lfm2,mamba,bloom", *flags)["families"]
    assert {name: family["passes"] for name, family in families.items()} == {
        "llama": "trees",
        "lfm2": "chains",
        "mamba": "chains by rows",
        "bloom": "chains",
    }
    assert families["lfm2"]["state_bytes"] > 0 == families["bloom"]["state_bytes"]
    assert families["mamba"]["kv_bytes_per_token"] == 0
    for family in families.values():
        assert [row["depth"] for row in family["chains"]] == [1, 2, 4, 8]
