"""The benchmark of drafter pools counts rounds rightly, and a small run shares sessions out."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.drafter_pool import longest_without_drafts


@pytest.mark.parametrize(
    ("drafted", "rounds"),
    [("", 0), ("ttt", 3), ("dtdtt", 1), ("ddtttdt", 2), ("tdttt", 2), ("dd", 0)],
)
def test_a_round_without_a_draft_delivers_the_target_s_token_alone(drafted: str, rounds: int) -> None:
    names = {"t": "target", "d": "drafter"}
    assert longest_without_drafts([names[one] for one in drafted]) == rounds


@pytest.mark.long
def test_two_drafters_share_the_sessions_and_the_death_of_one_changes_no_id(
    bench: Callable[..., dict[str, Any]],
) -> None:
    found = bench("drafter_pool", "--streams", "2", "--tokens", "160", "--repeats", "1")
    assert found["identical"]
    assert found["killed"]["identical"]
    # How many are followed by then hangs on how soon the drafter gets a core.
    assert sum(found["pools"]["1"]["followed"][0]) <= 2
    assert len(found["killed"]["followed"]) == 2
