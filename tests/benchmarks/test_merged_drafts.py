"""The replay of merged drafts runs small, its schema describes the result, and its arms merge as they say."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.merged_drafts import ARMS, DRAFTER, LOOKUP, Arm, ArmPool
from speculative.calibration import Calibration, SessionCalibrator
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash

IDS = (3, 4)


def survivals(arm: Arm) -> dict[int, float]:
    """Survivals of the tokens 5 and 6, of which the drafter has both and the lookup has one."""
    known = SessionCalibrator([Calibration(), Calibration()])
    pool = ArmPool(IDS, 16, 32, arm, known)
    for source, tokens, estimates in ((DRAFTER, (5, 6), (0.8, 0.4)), (LOOKUP, (6,), (0.5,))):
        parents = (-1,) * len(tokens)
        pool.offer(Fragment(source, 1, len(IDS), prefix_hash(IDS), tokens, parents, estimates))
    tree = pool.rank(8).tree(8)
    return {token: round(survival, 3) for token, survival in zip(tree.tokens, tree.survival, strict=True)}


def test_each_arm_merges_estimates_in_its_own_way() -> None:
    assert survivals(ARMS["largest"]) == {5: 0.8, 6: 0.5}
    assert survivals(ARMS["shared"]) == {5: 0.615, 6: 0.385}
    assert survivals(ARMS["pooled"]) == {5: 0.533, 6: 0.467}


@pytest.mark.slow
def test_the_replay_prints_what_its_schema_says(bench: Callable[..., dict[str, Any]]) -> None:
    small = ("--sets", "held_out", "--prompts", "1", "--tokens", "24", "--temperatures", "0")
    result = bench("merged-drafts", *small)
    cell = result["figures"]["0"]["held_out"]
    assert set(cell) == set(ARMS)
    for figures in cell.values():
        assert figures["rounds"] + sum(figures["accepted"].values()) == 24
    assert result["sums"]["0"]["largest"]["rounds"] == cell["largest"]["rounds"]
