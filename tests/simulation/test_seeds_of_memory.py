"""A session once failed where memory was full, though others could give way: scenarios by their seed."""

import pytest

from benchmarks.simulation.plan import Additions, plan_of
from benchmarks.simulation.world import simulate


@pytest.mark.parametrize("seed", [5005160, 5015308])
def test_a_session_whose_round_waits_for_drafts_gives_way(seed: int) -> None:
    assert simulate(seed).violations == []


def test_blocks_behind_which_another_session_has_cached_its_own_are_given_back() -> None:
    """Both had computed the same prefix, so the second one's next block continued the first one's."""
    plan = Additions(drafters=3, heads=True).to(plan_of(5025035))
    assert simulate(5025035, plan=plan).violations == []
