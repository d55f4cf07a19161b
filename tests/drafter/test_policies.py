"""Draft policies in the drafter: what a followed session's tree becomes under each of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from drafter_service.draft_tree import DraftNode, DraftTree, Growth
from drafter_service.settings import DrafterSettings
from speculative.policies.book import PolicyBook
from speculative.survival_curve import SurvivalCurve


def tree(policy: str, **growth: Any) -> DraftTree:
    bounds = Growth(children=4, floor=0.01, depth=growth.pop("depth", 8))
    chosen = PolicyBook(policy, bounds.limits).open()
    return DraftTree(7, 3, 99, growth=bounds, node_limit=50, end=1000, policy=chosen)


def grow(grown: DraftTree, children: Sequence[tuple[int, float]], entropy: float = 0.0) -> int:
    """Expands everything that may be expanded and sends it; returns the depth that was reached."""
    if grown.root.children is None:
        grown.expand(grown.root, children, entropy)
    grown.take_unsent()
    while leaves := grown.frontier(8):
        for leaf in leaves:
            grown.expand(leaf, children, entropy)
        grown.take_unsent()
    return max((node.position - grown.root.position for node in grown.nodes() if node.sent), default=0)


def test_a_fixed_depth_is_kept_and_counts_from_the_last_committed_token() -> None:
    grown = tree("fixed:3")
    assert grow(grown, [(1, 0.9)]) == 3
    grown.commit([1])
    assert grow(grown, [(1, 0.9)]) == 3
    grown.commit([5])
    assert grow(grown, [(1, 0.9)]) == 3


def test_a_confidence_threshold_sends_the_doubtful_token_and_nothing_below_it() -> None:
    grown = tree("confidence:0.5")
    assert grow(grown, [(1, 0.4), (2, 0.3)]) == 1
    sent = [node.token for node in grown.nodes() if node.sent]
    assert sent == [1, 2]
    grown.commit([1])
    assert grow(grown, [(1, 0.8), (2, 0.1)]) > 1, "the last committed token is never doubted"


def test_the_entropy_bound_drafts_one_place_ahead_and_no_further_where_all_is_flat() -> None:
    grown = tree("entropy:0.5")
    assert grow(grown, [(1, 0.5), (2, 0.4)], entropy=3.0) == 1
    assert grow(tree("entropy:0.5"), [(1, 0.5)], entropy=0.1) > 1


def below_a_flat_place() -> tuple[DraftTree, DraftNode]:
    """A tree, and a node two places ahead that the entropy bound holds back."""
    grown = tree("entropy:0.5")
    grown.expand(grown.root, [(1, 0.9)], 0.1)
    grown.take_unsent()
    (leaf,) = grown.frontier(1)
    grown.expand(leaf, [(4, 0.9)], 3.0)
    (withheld,) = (leaf.children or {}).values()
    return grown, withheld


def test_children_held_back_by_the_entropy_bound_are_sent_once_their_parent_is_committed() -> None:
    grown, withheld = below_a_flat_place()
    assert grown.take_unsent() == []
    grown.commit([1])
    assert grown.take_unsent() == [withheld]


def test_nothing_is_drafted_below_a_node_that_the_entropy_bound_holds_back() -> None:
    grown, withheld = below_a_flat_place()
    assert not grown.can_expand(withheld)
    grown.commit([1])
    assert grown.can_expand(withheld), "the node is sent now"


def test_the_tree_tells_a_policy_each_committed_place_that_was_drafted() -> None:
    grown = tree("survival")
    grow(grown, [(1, 0.6), (2, 0.3)])
    trials = grown.trials([1, 2, 9, 1])
    assert [trial.depth for trial in trials] == [1, 2, 3]
    assert [trial.hit for trial in trials] == [True, True, False]
    assert [guess.probability for guess in trials[0].guesses] == [0.6, 0.3]


def test_settings_refuse_a_wrong_policy_with_the_names() -> None:
    with pytest.raises(ValueError, match="give one of survival, fixed"):
        DrafterSettings(model="m", policy="best")


def test_a_tree_with_a_curve_learns_how_often_its_estimates_are_true() -> None:
    growth = Growth(children=4, floor=0.01, depth=1)
    grown = DraftTree(7, 3, 99, growth=growth, node_limit=50, end=10**6, curve=SurvivalCurve(strength=24.0))
    sent = []
    for number in range(400):
        grown.expand(grown.root, [(1, 0.9)])
        sent += [node.survival for node in grown.take_unsent()]
        committed = [1 if number % 3 == 0 else 2]
        grown.trials(committed)
        grown.commit(committed)
    assert sent[0] == pytest.approx(0.9)
    assert sent[-1] == pytest.approx(1 / 3, abs=0.08)


def test_estimates_that_the_curve_put_below_the_floor_come_back_once_they_are_true() -> None:
    growth = Growth(children=4, floor=0.2, depth=1)
    grown = DraftTree(
        7, 3, 99, growth=growth, node_limit=50, end=10**6, curve=SurvivalCurve(strength=1.0, memory=50.0)
    )

    def round_of(committed: int) -> bool:
        grown.expand(grown.root, [(1, 0.9)])
        sent = bool(grown.take_unsent())
        grown.trials([committed])
        grown.commit([committed])
        return sent

    wrong = [round_of(2) for _ in range(300)]
    assert wrong[0]
    assert not wrong[-1], "held back: the estimate was never true"
    assert [round_of(1) for _ in range(100)][-1]
