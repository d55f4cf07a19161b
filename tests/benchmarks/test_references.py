"""The benchmark of references runs small; a copy of the answer saves nearly all of the target's passes."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    "passes",
    [pytest.param("eager", marks=pytest.mark.slow), pytest.param("compiled", marks=pytest.mark.long)],
)
def test_drafts_from_references_keep_plain_ids_and_save_passes(
    bench: Callable[..., dict[str, Any]], passes: str
) -> None:
    result = bench(
        *("references", "--prompts", "1", "--tokens", "200", "--repeats", "1"),
        *("--budget", "fixed", "--replaced", "0,10", "--passes", passes),
    )

    assert result["identical"]
    for by_share in result["figures"].values():
        assert set(by_share) == {"0", "10"}
        assert by_share["0"]["acceptance_length"] > 30
        assert by_share["10"]["acceptance_length"] > 4
        assert by_share["0"]["accepted_share"] > 0.9
