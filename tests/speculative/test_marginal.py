"""Which of several sources a token counts for, and what is left of a gain once its rows are paid."""

import pytest

from speculative.marginal import SourceGain, credited

LAST = (2, 0, 0)


def taught(hits: int, own: int, nodes: int, rounds: int = 400) -> SourceGain:
    gain = SourceGain()
    for _ in range(rounds):
        gain.learn(hits, own, nodes)
    return gain


def test_a_node_of_several_sources_counts_for_the_best_of_them_alone() -> None:
    order = {4: (0, 0, 0), 1: (1, -3, 1), 2: (1, -5, 2)}
    assert credited((1, 2), order, LAST) == 2
    assert credited((1, 2, 4), order, LAST) == 4
    assert credited((9, 1), order, LAST) == 1
    assert credited((9, 8), order, LAST) == 9, "of two that are not in the order, the first to offer"


def test_a_source_is_graded_by_the_tokens_that_it_had_right() -> None:
    assert taught(2, 0, 0).grade > taught(1, 1, 0).grade
    assert taught(0, 0, 0).grade < SourceGain().grade


def test_its_share_is_what_counts_for_it_alone() -> None:
    assert SourceGain().share == 1.0
    assert taught(2, 1, 0).share == pytest.approx(0.5, rel=1e-3)
    assert taught(2, 0, 0).share < 0.01


def test_rows_that_cost_more_than_the_gain_leave_nothing() -> None:
    assert taught(2, 2, 10).net(0.05) == pytest.approx(0.75, rel=1e-2)
    assert taught(2, 2, 10).net(0.5) == 0.0
    assert taught(0, 0, 0).net(0.0) == 0.0


def test_one_that_is_right_beside_others_is_told_from_one_that_is_wrong() -> None:
    assert taught(2, 0, 0).often_right
    assert not taught(0, 0, 0, rounds=32).often_right
