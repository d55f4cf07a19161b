"""The benchmark of swaps runs small, and every followed session has drafts again."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_every_followed_session_reads_its_tokens_again_and_has_drafts(
    bench: Callable[..., dict[str, Any]],
) -> None:
    found = bench("swaps", "--sessions", "1", "3", "--tokens", "40", "--repeats", "2")
    assert set(found["by_sessions"]) == {"1", "3"}
    for count, row in found["by_sessions"].items():
        assert (row["drafted_again"], row["reread_ids"]) == (int(count), 40 * int(count))
        assert row["passes_until_drafts"] == 1, "all tokens fit into one pass"
        assert row["held_ms"]["worst"] <= row["drafts_ms"]["worst"]
